// Convolutions of 3 x 3 by fewer products (Winograd, after Toom and Cook): tiles of SIDE x SIDE results from tiles of IN x IN pixels. Both are
// seen as polynomials, evaluated at IN points (one is infinity), multiplied there, and interpolated. The points 0, +-3/4, +-3/2 make errors
// twice those of sums in order, the usual 0, +-1, +-2 make ten times as much. Evaluation mixes the pixels of a tile: where a result is not
// finite, its tile is computed anew in the plain way, so that NaN and infinity are where they belong.
#pragma once
#include "kernels.hpp"

template <int SIDE> struct Points;
template <> struct Points<2> {  // 0, 1, -1, infinity
  static constexpr float WEIGHT[3][4] = {{-1, 0, 0, 0}, {0, 1, -1, 0}, {0, 0, 0, 1}};  // what the plain weight is, by transformed ones
  template <int N> static ALWAYS void evaluate(vec<N>* d) {
    vec<N> zero = d[2] - d[0], one = d[2] + d[1], minus = d[2] - d[1], infinity = d[3] - d[1];
    d[0] = zero, d[1] = one, d[2] = minus, d[3] = infinity;
  }
  template <int N> static ALWAYS void interpolate(vec<N>* m) {
    vec<N> even = m[0] + m[1] + m[2], odd = m[1] - m[2] + m[3];
    m[0] = even, m[1] = odd;
  }
};
template <> struct Points<4> {  // 0, 3/4, -3/4, 3/2, -3/2, infinity
  static constexpr float A = 0.75f, B = 1.5f, AA = A * A, BB = B * B, FA = A * (AA - BB);
  static constexpr float WEIGHT[3][6] = {{AA * BB, 0, 0, 0, 0, 0}, {0, FA, -FA, 0, 0, 0}, {0, 0, 0, 0, 0, 1}};
  template <int N> static ALWAYS void evaluate(vec<N>* d) {
    vec<N> zero = d[4] - (AA + BB) * d[2] + (AA * BB) * d[0], infinity = d[5] - (AA + BB) * d[3] + (AA * BB) * d[1];
    vec<N> even = d[4] - BB * d[2], odd = A * d[3] - (A * BB) * d[1], even2 = d[4] - AA * d[2], odd2 = B * d[3] - (B * AA) * d[1];
    d[0] = zero, d[1] = even + odd, d[2] = even - odd, d[3] = even2 + odd2, d[4] = even2 - odd2, d[5] = infinity;
  }
  template <int N> static ALWAYS void interpolate(vec<N>* m) {
    vec<N> s = m[1] + m[2], d = m[1] - m[2], s2 = m[3] + m[4], d2 = m[3] - m[4];
    m[0] = m[0] + s + s2;
    m[1] = A * d + B * d2;
    m[2] = AA * s + BB * s2;
    m[3] = (A * AA) * d + (B * BB) * d2 + m[5];
  }
};

// An image [IMAGES, IH, IW, C], whose pixels are CS apart, and its results [OH, OW]. BLOCK tiles at a time.
template <int SIDE_, int IMAGES_, int C_, int CS_, int IH_, int IW_, int PH_, int PW_, int BLOCK_> struct Tiled {
  static constexpr int SIDE = SIDE_, IN = SIDE_ + 2, POINTS = IN * IN, C = C_, CS = CS_, IH = IH_, IW = IW_, PH = PH_, PW = PW_, BLOCK = BLOCK_;
  static constexpr int OH = IH + 2 * PH - 2, OW = IW + 2 * PW - 2, TY = (OH + SIDE - 1) / SIDE, TX = (OW + SIDE - 1) / SIDE;
  static constexpr int COUNT = IMAGES_ * TY * TX, BLOCKS = (COUNT + BLOCK - 1) / BLOCK, WIDE = (C + L - 1) / L * L;
  struct At { long image; int y, x; };  // of a tile's first result
  static ALWAYS At at(long tile) { return {tile / (TY * TX), (int)(tile / TX % TY) * SIDE, (int)(tile % TX) * SIDE}; }
};

// The tiles from `first` on, at all points: [POINTS, BLOCK, WIDE].
template <class G> static __attribute__((noinline)) void evaluated(const float* in, long first, long count, float* to) {
  for (long t = 0; t < count; t++) {
    auto at = G::at(first + t);
    int top = at.y - G::PH, left = at.x - G::PW;
    bool inner = top >= 0 && left >= 0 && top + G::IN <= G::IH && left + G::IN <= G::IW;
    const float* from = in + ((at.image * G::IH + top) * G::IW + left) * (long)G::CS;
    for (int c = 0; c < G::WIDE; c += L) {
      vec<L> d[G::IN][G::IN];
      for (int x = 0; x < G::IN; x++) {
        vec<L> line[G::IN];
        for (int y = 0; y < G::IN; y++) {
          bool is_there = inner || ((unsigned)(top + y) < (unsigned)G::IH && (unsigned)(left + x) < (unsigned)G::IW);
          line[y] = is_there ? load<L>(from + ((long)y * G::IW + x) * G::CS + c) : vec<L>{};
        }
        Points<G::SIDE>::template evaluate<L>(line);
        for (int y = 0; y < G::IN; y++) d[y][x] = line[y];
      }
      for (int y = 0; y < G::IN; y++) {
        Points<G::SIDE>::template evaluate<L>(d[y]);
        for (int x = 0; x < G::IN; x++) store<L>(to + ((long)(y * G::IN + x) * G::BLOCK + t) * G::WIDE + c, d[y][x]);
      }
    }
  }
}

// A tile's result in the plain way, for N of the columns; `w` points to the first of them, POINT floats from point to point, W from row to row.
template <class G, int N> static __attribute__((noinline, cold)) void plainly(const float* in, const float* w, long point, int w_step, vec<N> bias, typename G::At at, vec<N>* y) {
  for (int i = 0; i < G::SIDE * G::SIDE; i++) y[i] = bias;
  for (int c = 0; c < G::C; c++)
    for (int k = 0; k < 9; k++) {
      vec<N> weight = {};
      for (int p = 0; p < G::POINTS; p++)
        weight += Points<G::SIDE>::WEIGHT[k / 3][p / G::IN] * Points<G::SIDE>::WEIGHT[k % 3][p % G::IN] * load<N>(w + p * point + (long)c * w_step);
      for (int i = 0; i < G::SIDE * G::SIDE; i++) {
        int row = at.y + i / G::SIDE + k / 3 - G::PH, column = at.x + i % G::SIDE + k % 3 - G::PW;
        if (row >= 0 && row < G::IH && column >= 0 && column < G::IW) y[i] += weight * in[((at.image * G::IH + row) * G::IW + column) * (long)G::CS + c];
      }
    }
}

// Where the products of a panel are, [POINTS, BLOCK, W], and what belongs to them.
struct Products { const float *at, *in, *w, *bias; long point; int w_step; };

// N columns of a tile's results, from `column` on, which is `within` the panel.
template <class G, int N, int W, int COLUMNS, bool EXACT, class E>
static ALWAYS void interpolated(const Products& its, const E& e, float* out, long step, long first, long t, int column, int within) {
  vec<N> y[G::SIDE * G::SIDE], m[G::IN][G::IN], bias = load<N>(its.bias + column), odd = {};
  for (int x = 0; x < G::IN; x++) {
    vec<N> line[G::IN];
    for (int k = 0; k < G::IN; k++) line[k] = load<N>(its.at + ((long)(k * G::IN + x) * G::BLOCK + t) * W + within);
    Points<G::SIDE>::template interpolate<N>(line);
    for (int k = 0; k < G::SIDE; k++) m[k][x] = line[k];
  }
  for (int k = 0; k < G::SIDE; k++) {
    Points<G::SIDE>::template interpolate<N>(m[k]);
    for (int x = 0; x < G::SIDE; x++) { y[k * G::SIDE + x] = m[k][x] + bias; odd += y[k * G::SIDE + x] * 0.f; }
  }
  auto at = G::at(first + t);
  if (folded<N>(odd, []<int M>(vec<M> a, vec<M> b) __attribute__((always_inline)) { return a + b; }) != 0.f) plainly<G, N>(its.in, its.w + within, its.point, its.w_step, bias, at, y);
  for (int k = 0; k < G::SIDE * G::SIDE; k++) {
    int row = at.y + k / G::SIDE, x = at.x + k % G::SIDE;
    if (row >= G::OH || x >= G::OW) continue;
    long pixel = (at.image * G::OH + row) * G::OW + x;
    vec<N> f = e.template operator()<N>(y[k], pixel, column);
    if constexpr (EXACT && COLUMNS % N != 0) { if (column + N > COLUMNS) { store_some<COLUMNS % N, N>(out + pixel * step + column, f); continue; } }
    store<N>(out + pixel * step + column, f);
  }
}

// Columns of the widest panel: the last may have half a vector beside a full one.
template <int NV, int COLUMNS> constexpr int panel_step() { return (NV + (half_vector(COLUMNS) && whole_vectors(COLUMNS) % NV == 0)) * L; }

template <class G, int NV, int COLUMNS, bool EXACT, class E>
static __attribute__((noinline)) void interpolated_panel(const Products& its, const E& e, float* out, long step, long first, long count, int p) {
  constexpr int W = panel_step<NV, COLUMNS>(), WHOLE = whole_vectors(COLUMNS) * L;
  int begin = p * NV * L, end = begin + NV * L < WHOLE ? begin + NV * L : WHOLE;
  for (long t = 0; t < count; t++) {
    int column = begin;
    for (; column < end; column += L) interpolated<G, L, W, COLUMNS, EXACT>(its, e, out, step, first, t, column, column - begin);
    if constexpr (half_vector(COLUMNS)) if (p == panels<NV, COLUMNS>() - 1) interpolated<G, L / 2, W, COLUMNS, EXACT>(its, e, out, step, first, t, column, column - begin);
  }
}

struct Untouched { template <int N> ALWAYS vec<N> operator()(vec<N> v, long, int) const { return v; } };

// Weights: the bias, then for each point panels as of a product. Threads share tiles, or panels where the weights are what is moved most.
template <class G, int COLUMNS, int MR, int NV, bool BY_PANELS, bool EXACT, class E>
static void winograd(const Run& run, const float* in, const float* w, const E& e, float* out, long step) {
  constexpr int P = panels<NV, COLUMNS>(), W = panel_step<NV, COLUMNS>(), BIAS = (width(COLUMNS) + L - 1) / L * L;
  constexpr long POINT = (long)width(COLUMNS) * (G::C + 1);
  using Row = Taps<1, 1, G::C, 0, 0, 1, G::WIDE>;
  alignas(64) float given[(long)G::POINTS * G::BLOCK * G::WIDE], made[(long)G::POINTS * G::BLOCK * W];
  Share blocks = BY_PANELS ? Share{0, G::BLOCKS} : share_of(G::BLOCKS, run.id, run.count);
  Share part = BY_PANELS ? share_of(P, run.id, run.count) : Share{0, P};
  for (long block = blocks.begin; block < blocks.end; block++) {
    long first = block * G::BLOCK, count = G::COUNT - first < G::BLOCK ? G::COUNT - first : G::BLOCK;
    evaluated<G>(in, first, count, given);
    for (int p = part.begin; p < part.end; p++) {
      for (int k = 0; k < G::POINTS; k++)
        panel<Row, MR, G::BLOCK % MR, NV, COLUMNS, false>(given + (long)k * G::BLOCK * G::WIDE, w + BIAS + k * POINT, Untouched{}, made + (long)k * G::BLOCK * W - p * NV * L, 0, G::BLOCK, p, W);
      int wide = p == P - 1 ? width(COLUMNS) - p * NV * L : NV * L;
      Products its{made, in, w + BIAS + (long)p * NV * L * (G::C + 1) + wide, w, POINT, wide};
      interpolated_panel<G, NV, COLUMNS, EXACT>(its, e, out, step, first, count, p);
    }
  }
}
