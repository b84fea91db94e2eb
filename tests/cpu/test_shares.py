"""Threads share what a stage does: each unit is one thread's, none does much more than another, and none goes on before all are done."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from lowtide.cpu.network import FLAGS
from lowtide.runtime.libraries import compile_library

_SOURCE = """
#include <thread>
#include <vector>
#include "kernels.hpp"
// How often each of outer x inner units is somebody's, and the most units of one thread.
extern "C" long shared(long outer, long inner, int threads, int* times) {
  long most = 0;
  for (int id = 0; id < threads; id++) {
    long own = 0;
    for (auto [o, i] : Rectangles(share_of(outer * inner, inner, id, threads), inner))
      for (long a = o.begin; a < o.end; a++)
        for (long b = i.begin; b < i.end; b++) times[a * inner + b]++, own++;
    most = own > most ? own : most;
  }
  return most;
}
template <long ROWS, int N, int MR, int NV, bool BY_PANELS> static long tiles(int threads, int* times) {
  constexpr long P = panels<NV, N>(), TILES = (ROWS + MR - 1) / MR, INNER = BY_PANELS ? TILES : P;
  for (int id = 0; id < threads; id++) {
    Share share{border<ROWS, N, MR, NV, BY_PANELS>(id, threads), border<ROWS, N, MR, NV, BY_PANELS>(id + 1, threads)};
    for (auto [o, i] : Rectangles(share, INNER))
      for (long a = o.begin; a < o.end; a++)
        for (long b = i.begin; b < i.end; b++) times[a * INNER + b]++;
  }
  return P * TILES;
}
// Stages by so many threads, again and again: how often one went on from a barrier to which not all had come.
extern "C" long passed(int threads) {
  static Team team;
  std::atomic<long> came[64] = {}, early{0};
  std::atomic<int64_t> round{0};
  auto work = [&](int id) {
    Run run{&team, id, threads, nullptr, team.round};
    for (long stage = 1; stage <= 100; stage++) {
      came[id].store(stage);
      barrier(run);
      for (int other = 0; other < threads; other++) early += came[other].load() < stage;
      barrier(run);
    }
    if (id == 0) round = run.round;
  };
  std::vector<std::thread> all;
  for (int id = 0; id < threads; id++) all.emplace_back(work, id);
  for (auto& each : all) each.join();
  team.round = round;
  return early;
}
extern "C" long tiled(int which, int threads, int* times) {
  switch (which) {
    case 0: return tiles<1, 1000, 6, 4, true>(threads, times);
    case 1: return tiles<49, 320, 6, 4, true>(threads, times);
    case 2: return tiles<49, 320, 6, 4, false>(threads, times);
    case 3: return tiles<3136, 24, 6, 2, false>(threads, times);
    case 4: return tiles<7, 8, 6, 1, false>(threads, times);
    case 5: return tiles<5, 33, 14, 2, true>(threads, times);
    default: return tiles<128, 500, 6, 4, false>(threads, times);
  }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("shares")
    source, made = folder / "shares.cpp", folder / "shares.so"
    source.write_text(_SOURCE, encoding="utf-8")
    compile_library(source, made, options=FLAGS)
    found = ctypes.CDLL(str(made))
    found.shared.argtypes, found.shared.restype = (ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_void_p), ctypes.c_long
    found.tiled.argtypes, found.tiled.restype = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p), ctypes.c_long
    found.passed.argtypes, found.passed.restype = (ctypes.c_int,), ctypes.c_long
    return found


def test_each_unit_is_one_threads(library: ctypes.CDLL) -> None:
    for outer in range(1, 30):
        for inner in range(1, 20):
            for threads in (1, 2, 3, 5, 8):
                times = (ctypes.c_int * (outer * inner))()
                most = library.shared(outer, inner, threads, times)
                assert set(times) == {1}, (outer, inner, threads)
                assert most <= outer * inner / threads * 1.1 + 1, (outer, inner, threads)


def test_each_tile_of_a_product_is_one_threads(library: ctypes.CDLL) -> None:
    for which in range(7):
        for threads in (1, 2, 3, 5, 8, 16):
            times = (ctypes.c_int * 10_000)()
            count = library.tiled(which, threads, times)
            assert list(times) == [1] * count + [0] * (10_000 - count), (which, threads)


def test_nobody_goes_on_before_all_are_there(library: ctypes.CDLL) -> None:
    assert [library.passed(threads) for threads in (2, 3, 2, 5, 8, 3, 1, 2)] == [0] * 8
