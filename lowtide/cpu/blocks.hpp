// Several operators as one kernel, row by row (AGO, section III-B2): rows of what comes first go through a ring, a window slides over them,
// and each row of its results is finished at once. Nothing is computed twice but, where threads meet, the rows that windows share.
#pragma once
#include "kernels.hpp"

// Windows over rows that lie anywhere: lines[y] is the row of tap y, or null outside of the image.
struct RingWeighted {
  template <class G, int N, int XB> static ALWAYS void inner(vec<N>* acc, const float* const* lines, long at, const float* w, int from, int to) {
    for (int b = 0; b < XB; b++) acc[b] = load<N>(w);
    for (int y = from; y < to; y++) {
      const float* line = lines[y] + at;
      vec<N> k[G::KW];
      for (int x = 0; x < G::KW; x++) k[x] = load<N>(w + (1 + y * G::KW + x) * N);
#pragma GCC unroll 16
      for (int b = 0; b < XB; b++)
#pragma GCC unroll 16
        for (int x = 0; x < G::KW; x++) acc[b] += load<N>(line + (b * G::SW + x * G::DW) * G::IS) * k[x];
    }
  }
  template <class G, int N> static ALWAYS vec<N> edge(const float* const* lines, long at, const float* w, int from, int to, int left, int right) {
    vec<N> acc = load<N>(w);
    for (int y = from; y < to; y++)
      for (int x = left; x < right; x++) acc += load<N>(lines[y] + at + x * G::DW * G::IS) * load<N>(w + (1 + y * G::KW + x) * N);
    return acc;
  }
  static constexpr bool weights = true;
};
struct RingLargest {
  template <class G, int N, int XB> static ALWAYS void inner(vec<N>* acc, const float* const* lines, long at, const float*, int from, int to) {
    for (int b = 0; b < XB; b++) acc[b] = edge<G, N>(lines, at + b * G::SW * G::IS, nullptr, from, to, 0, G::KW);
  }
  template <class G, int N> static ALWAYS vec<N> edge(const float* const* lines, long at, const float*, int from, int to, int left, int right) {
    vec<N> acc = all<N>(-INFINITY);
    for (int y = from; y < to; y++)
      for (int x = left; x < right; x++) acc = larger<N>(load<N>(lines[y] + at + x * G::DW * G::IS), acc);
    return acc;
  }
  static constexpr bool weights = false;
};

// One row of results for N channels from `column` on.
template <class K, class G, int N, int XB, bool EXACT, int C, class E>
static ALWAYS void ring_row(const float* const* lines, const float* w, const E& e, float* out, int from, int to, long row, int column, long step) {
  auto put = [&](int x, vec<N> v) __attribute__((always_inline)) {
    vec<N> f = e.template operator()<N>(v, row + x, column);
    if constexpr (EXACT && C % N != 0) { if (column + N > C) { store_some<C % N, N>(out + x * step, f); return; } }
    store<N>(out + x * step, f);
  };
  auto edges = [&](int x, int end) __attribute__((always_inline)) {
    for (; x < end; x++) {
      int at = x * G::SW - G::PW, left = rounded_up(-at, G::DW), right = rounded_up(G::IW - at, G::DW);
      put(x, K::template edge<G, N>(lines, (long)at * G::IS + column, w, from, to, left, right < G::KW ? right : G::KW));
    }
  };
  auto some = [&]<int B>(int x) __attribute__((always_inline)) {
    vec<N> acc[B];
    K::template inner<G, N, B>(acc, lines, (long)(x * G::SW - G::PW) * G::IS + column, w, from, to);
#pragma GCC unroll 16
    for (int b = 0; b < B; b++) put(x + b, acc[b]);
  };
  edges(0, G::LEFT);
  int x = G::LEFT;
  for (; x + XB <= G::RIGHT; x += XB) some.template operator()<XB>(x);
  constexpr int REST = (G::RIGHT - G::LEFT) % XB;
  if constexpr (REST > 0) some.template operator()<REST>(x);
  edges(G::RIGHT, G::OW);
}

template <class K, class G, int C, int XB, bool EXACT, class E>
static __attribute__((noinline)) void ring_rows(const float* const* lines, const float* w, const E& e, float* out, int from, int to, long row, long step) {
  constexpr int H = half_vector(C), W = whole_vectors(C);
  for (int p = 0; p < W; p++)
    ring_row<K, G, L, XB, EXACT, C>(lines, K::weights ? w + (long)p * L * (1 + G::KH * G::KW) : nullptr, e, out + p * L, from, to, row, p * L, step);
  if constexpr (H)
    ring_row<K, G, L / 2, XB, EXACT, C>(lines, K::weights ? w + (long)W * L * (1 + G::KH * G::KW) : nullptr, e, out + W * L, from, to, row, W * L, step);
}

// `expand(y, to)` makes row y of the image that the window slides over; `finish(line, y)` makes of a row of results what is stored.
template <class K, class G, int C, int STEP, int XB, class X, class E, class F>
static void through_ring(const Run& run, const X& expand, const float* w, const E& e, const F& finish) {
  constexpr int SPAN = (G::KH - 1) * G::DH + 1;
  alignas(64) float ring[(long)SPAN * G::IW * G::IS + 4 * L], line[(long)G::OW * STEP + 4 * L];
  Share rows = share_of(G::OH, run.id, run.count);
  long next = 0;
  for (long oy = rows.begin; oy < rows.end; oy++) {
    int top = oy * G::SH - G::PH, from = rounded_up(-top, G::DH), to = rounded_up(G::IH - top, G::DH);
    if (to > G::KH) to = G::KH;
    if (next < top) next = top;
    for (long end = top + SPAN < G::IH ? top + SPAN : G::IH; next < end; next++) expand(next, ring + next % SPAN * (G::IW * G::IS));
    const float* lines[G::KH];
    for (int y = from; y < to; y++) lines[y] = ring + (top + y * G::DH) % SPAN * (G::IW * G::IS);
    ring_rows<K, G, C, XB, false>(lines, w, e, line, from, to, oy * G::OW, STEP);
    finish(line, oy);
  }
}

// The same without a first operator, over an image in memory.
template <class K, class G, int C, int STEP, int XB, class E, class F>
static void over_image(const Run& run, const float* in, const float* w, const E& e, const F& finish) {
  alignas(64) float line[(long)G::OW * STEP + 4 * L];
  Share rows = share_of(G::OH, run.id, run.count);
  for (long oy = rows.begin; oy < rows.end; oy++) {
    int top = oy * G::SH - G::PH, from = rounded_up(-top, G::DH), to = rounded_up(G::IH - top, G::DH);
    if (to > G::KH) to = G::KH;
    const float* lines[G::KH];
    for (int y = from; y < to; y++) lines[y] = in + (long)(top + y * G::DH) * G::IW * G::IS;
    ring_rows<K, G, C, XB, false>(lines, w, e, line, from, to, oy * G::OW, STEP);
    finish(line, oy);
  }
}

// The same without a last operator: results are stored as they are made.
template <class K, class G, int C, int XB, bool EXACT, class X, class E>
static void from_ring(const Run& run, const X& expand, const float* w, const E& e, float* out, long step) {
  constexpr int SPAN = (G::KH - 1) * G::DH + 1;
  alignas(64) float ring[(long)SPAN * G::IW * G::IS + 4 * L];
  Share rows = share_of(G::OH, run.id, run.count);
  long next = 0;
  for (long oy = rows.begin; oy < rows.end; oy++) {
    int top = oy * G::SH - G::PH, from = rounded_up(-top, G::DH), to = rounded_up(G::IH - top, G::DH);
    if (to > G::KH) to = G::KH;
    if (next < top) next = top;
    for (long end = top + SPAN < G::IH ? top + SPAN : G::IH; next < end; next++) expand(next, ring + next % SPAN * (G::IW * G::IS));
    const float* lines[G::KH];
    for (int y = from; y < to; y++) lines[y] = ring + (top + y * G::DH) % SPAN * (G::IW * G::IS);
    ring_rows<K, G, C, XB, EXACT>(lines, w, e, out + oy * G::OW * step, from, to, oy * G::OW, step);
  }
}

// COUNT rows of a product, or of a convolution, through all panels.
template <class T, long COUNT, int N, int MR, int NV, bool EXACT, class E>
static ALWAYS void some_rows(const float* a, const float* w, const E& e, float* out, long row, long step) {
  for (int p = 0; p < panels<NV, N>(); p++) panel<T, MR, COUNT % MR, NV, N, EXACT>(a, w, e, out, row, COUNT, p, step);
}
