// Products of two tensors that both differ from call to call, softmax, and attention as one kernel: scores of a few rows at a time.
#pragma once
#include "kernels.hpp"

// The register tile of these kernels: so many rows by so many vectors.
constexpr int BR = 6, BV = REGISTERS >= 32 ? 4 : 2;

// MR rows of `a`, whose elements are AK apart, by NV vectors of `b`, whose rows are `bs` apart: `put(r, v, sum)`.
template <int MR, int NV, long AR, long AK, class F>
static ALWAYS void summed(const float* __restrict a, const float* __restrict b, long bs, long count, const F& put) {
  vec<L> acc[MR][NV] = {};
  for (long k = 0; k < count; k++) {
    vec<L> w[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) w[v] = load<L>(b + k * bs + v * L);
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
      float s = a[r * AR + k * AK];
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] += s * w[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) put(r, v, acc[r][v]);
}

// All vectors of `columns` columns; `put(r, column, sum)`. As a function of its own, or GCC keeps accumulators in memory.
template <int MR, long AR, long AK, class F>
static __attribute__((noinline)) void wide(const float* a, const float* b, long bs, long count, long columns, const F& put) {
  long j = 0, vectors = (columns + L - 1) / L;
  auto some = [&]<int NV>() __attribute__((always_inline)) {
    summed<MR, NV, AR, AK>(a, b + j * L, bs, count, [&](int r, int v, vec<L> sum) __attribute__((always_inline)) { put(r, (j + v) * L, sum); });
    j += NV;
  };
  while (vectors - j >= BV && vectors - j != BV + 1) some.template operator()<BV>();
  if (vectors - j == BV + 1) some.template operator()<BV - 1>();  // two of some vectors are faster than one of many and one of one
  if constexpr (BV > 3) if (vectors - j == 3) some.template operator()<3>();
  if (vectors - j == 2) some.template operator()<2>();
  if (vectors - j == 1) some.template operator()<1>();
}

template <int C> static ALWAYS void store_within(float* to, long column, vec<L> v) {
  if constexpr (C % L != 0) { if (column + L > C) { store_some<C % L, L>(to + column, v); return; } }
  store<L>(to + column, v);
}

// [BATCH, M, K] by [BATCH, K, N]: threads share rows of all matrices.
template <long BATCH, long M, long K, int N, long AB, long AR, long AK, long BB, long BS, class E>
static void batched(const Run& run, const float* a, const float* b, const E& e, float* out, long step) {
  constexpr long BLOCKS = (M + BR - 1) / BR;
  Share share = share_of(BATCH * BLOCKS, run.id, run.count);
  for (long i = share.begin; i < share.end; i++) {
    long n = i / BLOCKS, row = i % BLOCKS * BR;
    auto some = [&]<int MR>() __attribute__((always_inline)) {
      wide<MR, AR, AK>(a + n * AB + row * AR, b + n * BB, BS, K, N, [&](int r, long column, vec<L> sum) __attribute__((always_inline)) {
        long at = n * M + row + r;
        store_within<N>(out + at * step, column, e.template operator()<L>(sum, at, column));
      });
    };
    if (row + BR <= M) some.template operator()<BR>();
    else if constexpr (M % BR) some.template operator()<M % BR>();
  }
}

// The largest of a row: NaN where there is one.
static ALWAYS float largest_of(const float* p, long count) {
  vec<L> many = all<L>(-INFINITY);
  vec<1> few = all<1>(-INFINITY);
  along(count, [&]<int N>(long j) __attribute__((always_inline)) {
    if constexpr (N == L) many = larger<L>(load<L>(p + j), many);
    else for (int i = 0; i < N; i++) few = larger<1>(load<1>(p + j + i), few);
  });
  float most = folded<L>(many, []<int N>(vec<N> a, vec<N> b) __attribute__((always_inline)) { return larger<N>(a, b); });
  return larger<1>(all<1>(most), few)[0];
}

// e^(x - most), and the sum of all.
static ALWAYS float exponentials(const float* p, float* to, long count, float most) {
  vec<L> many = {};
  float few = 0;
  along(count, [&]<int N>(long j) __attribute__((always_inline)) {
    vec<N> x = exponential<N>(load<N>(p + j) - most);
    store<N>(to + j, x);
    if constexpr (N == L) many += x; else for (int i = 0; i < N; i++) few += x[i];
  });
  return sum_of(many) + few;
}

// Softmax: each row by itself. SAFE: where all is masked, zeros.
template <long ROWS, int C, int IS, bool SAFE, class E>
static void softmax_rows(const Run& run, const float* in, const E& e, float* out, long step) {
  Share share = share_of(ROWS, run.id, run.count);
  float line[C];
  for (long r = share.begin; r < share.end; r++) {
    float most = largest_of(in + r * IS, C);
    bool none = SAFE && most == -INFINITY;
    float by = 1.f / exponentials(in + r * IS, line, C, none ? 0.f : most);
    if (none) by = 0.f;
    along(C, [&]<int N>(long j) __attribute__((always_inline)) { store<N>(out + r * step + j, e.template operator()<N>(load<N>(line + j) * by, r, j)); });
  }
}

template <long B_, long H_, long ROW_, long ONE_> struct Steps { static constexpr long B = B_, H = H_, ROW = ROW_, ONE = ONE_; };

// softmax(scale * query by key + mask) by value. `key` has keys side by side; MASK, where there is one, too, or one number for all keys.
template <long B, long H, long Q, long K, int D, int V, bool CAUSAL, bool MASKED, class Query, class Key, class Value, class Mask, class Out>
static void attention(const Run& run, const float* query, const float* key, const float* value, const float* mask, float* out, float scale) {
  constexpr long BLOCKS = (Q + BR - 1) / BR, WIDE = (K + L - 1) / L * L;
  Share share = share_of(B * H * BLOCKS, run.id, run.count);
  alignas(64) float scores[BR][WIDE];
  for (long i = share.begin; i < share.end; i++) {
    long row = i % BLOCKS * BR, h = i / BLOCKS % H, b = i / BLOCKS / H;
    auto some = [&]<int MR>() __attribute__((always_inline)) {
      long seen = CAUSAL && row + MR < K ? row + MR : K;
      const float* from = query + b * Query::B + h * Query::H + row * Query::ROW;
      wide<MR, Query::ROW, Query::ONE>(from, key + b * Key::B + h * Key::H, Key::ROW, D, seen,
          [&](int r, long column, vec<L> sum) __attribute__((always_inline)) { store<L>(scores[r] + column, sum * scale); });
      float by[MR];
      for (int r = 0; r < MR; r++) {
        float* line = scores[r];
        if constexpr (MASKED) {
          const float* its = mask + b * Mask::B + h * Mask::H + (row + r) * Mask::ROW;
          along(seen, [&]<int N>(long j) __attribute__((always_inline)) { store<N>(line + j, load<N>(line + j) + (Mask::ONE ? load<N>(its + j) : all<N>(its[0]))); });
        }
        if constexpr (CAUSAL) for (long j = row + r + 1; j < seen; j++) line[j] = -INFINITY;
        float most = largest_of(line, seen);
        by[r] = most == -INFINITY ? 0.f : 1.f;  // as eager's: zeros where all is masked
        by[r] /= exponentials(line, line, seen, most == -INFINITY ? 0.f : most) + (1.f - by[r]);
      }
      float* to = out + b * Out::B + h * Out::H + row * Out::ROW;
      wide<MR, WIDE, 1>(scores[0], value + b * Value::B + h * Value::H, Value::ROW, seen, V,
          [&](int r, long column, vec<L> sum) __attribute__((always_inline)) { store_within<V>(to + r * Out::ROW, column, sum * by[r]); });
    };
    if (row + BR <= Q) some.template operator()<BR>();
    else if constexpr (Q % BR) some.template operator()<Q % BR>();
  }
}
