// What generated networks are made of: products, convolutions and element-wise loops over tensors whose channels lie side by side.
//
// All extents and strides are template arguments, in floats; weights are packed in panels of PW columns: the bias, then a row for each
// tap and input channel. A column count is rounded up to half a vector (`width`), and where a row of the result has no room for that, its
// last vector is stored in part. Sums run over k in order within each accumulator.
#pragma once
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int L = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int L = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int L = 4, REGISTERS = 32;
#else
constexpr int L = 4, REGISTERS = 16;
#endif
#define ALWAYS inline __attribute__((always_inline))
// A compiler reads <atomic> and <cmath> for longer than all that is here.
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

template <int N> struct vector_of { typedef float type __attribute__((vector_size(N * 4))); typedef int32_t mask __attribute__((vector_size(N * 4))); };
template <int N> using vec = typename vector_of<N>::type;
template <int N> using ivec = typename vector_of<N>::mask;

template <int N> static ALWAYS vec<N> load(const float* p) { vec<N> v; memcpy(&v, p, sizeof v); return v; }
template <int N> static ALWAYS void store(float* p, vec<N> v) { memcpy(p, &v, sizeof v); }
template <int N> static ALWAYS vec<N> all(float x) { return x - vec<N>{}; }
static ALWAYS vec<L / 2> lower(vec<L> v) { vec<L / 2> half; memcpy(&half, &v, sizeof half); return half; }
template <int N> static ALWAYS vec<N> every(const float* p, long stride) { vec<N> v; for (int i = 0; i < N; i++) v[i] = p[i * stride]; return v; }
template <int N> static ALWAYS void spread(float* p, long stride, vec<N> v) { for (int i = 0; i < N; i++) p[i * stride] = v[i]; }
template <int C, int N> static ALWAYS void store_some(float* p, vec<N> v) { memcpy(p, &v, 4 * (C < N ? C : N)); }
template <int N> static ALWAYS void store_pairs(float* p, vec<N> a, vec<N> b) {  // a0 b0 a1 b1 ..
  if constexpr (N == 1) p[0] = a[0], p[1] = b[0];
  else [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    store<N>(p, __builtin_shufflevector(a, b, (I / 2 + I % 2 * N)...));
    store<N>(p + N, __builtin_shufflevector(a, b, (N / 2 + I / 2 + I % 2 * N)...));
  }(std::make_integer_sequence<int, N>{});
}

// Comparisons that are false for NaN keep it.
template <int N> static ALWAYS vec<N> at_least(vec<N> x, float low) {
#if defined(__AVX512F__)
  if constexpr (N == 16) return (vec<N>)_mm512_max_ps((__m512)all<N>(low), (__m512)x);
#endif
#if defined(__AVX__)
  if constexpr (N == 8) return (vec<N>)_mm256_max_ps((__m256)all<N>(low), (__m256)x);
#endif
  return x < all<N>(low) ? all<N>(low) : x;
}
template <int N> static ALWAYS vec<N> at_most(vec<N> x, float high) {
#if defined(__AVX512F__)
  if constexpr (N == 16) return (vec<N>)_mm512_min_ps((__m512)all<N>(high), (__m512)x);
#endif
#if defined(__AVX__)
  if constexpr (N == 8) return (vec<N>)_mm256_min_ps((__m256)all<N>(high), (__m256)x);
#endif
  return x > all<N>(high) ? all<N>(high) : x;
}
template <int N> static ALWAYS vec<N> larger(vec<N> a, vec<N> b) { return (a > b) | (a != a) ? a : b; }
template <int N> static ALWAYS vec<N> smaller(vec<N> a, vec<N> b) { return (a < b) | (a != a) ? a : b; }
template <int N> static ALWAYS vec<N> root(vec<N> x) { for (int i = 0; i < N; i++) x[i] = __builtin_sqrtf(x[i]); return x; }
template <int N> static ALWAYS vec<N> magnitude(vec<N> x) { return (vec<N>)((ivec<N>)x & 0x7fffffff); }

// exp: x = n ln 2 + r, a polynomial of degree 6 for e^r (error below 2 units in the last place), n by the exponent's bits in two steps, or
// by the one instruction that also knows what becomes of too much, too little, and NaN.
template <int N> static ALWAYS vec<N> power_of_e(vec<N> r) {
  vec<N> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f; p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f;
  return p * r * r + r + 1.f;
}
template <int N> static ALWAYS vec<N> exponential(vec<N> x) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    vec<N> y = at_most<N>(at_least<N>(x, -120.f), 120.f);  // what is left of infinities is a number
    __m512 n = _mm512_roundscale_ps((__m512)(y * 1.44269504088896341f), 8);
    vec<N> r = y - (vec<N>)n * 0.693145751953125f;
    return (vec<N>)_mm512_scalef_ps((__m512)power_of_e<N>(r - (vec<N>)n * 1.428606765330187e-6f), n);
  }
#endif
  vec<N> y = at_most<N>(at_least<N>(x, -104.f), 89.f);
  vec<N> n = y * 1.44269504088896341f + 12582912.f;  // rounds to the nearest integer
  ivec<N> k = (ivec<N>)n - 0x4b400000;
  n = n - 12582912.f;
  vec<N> r = y - n * 0.693145751953125f;
  vec<N> p = power_of_e<N>(r - n * 1.428606765330187e-6f);
  ivec<N> half = k >> 1;
  p = p * (vec<N>)((half + 127) << 23) * (vec<N>)((k - half + 127) << 23);
  return x != x ? x : p;
}
template <int N> static ALWAYS vec<N> logistic(vec<N> x) { return 1.f / (1.f + exponential<N>(-x)); }
template <int N> static ALWAYS vec<N> hyperbolic(vec<N> x) {
  vec<N> a = magnitude<N>(x), s = x * x;
  vec<N> small = x + x * s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f)));
  vec<N> e = exponential<N>(-2.f * a), big = (1.f - e) / (1.f + e);
  big = x < 0.f ? -big : big;
  return a < 0.25f ? small : (x != x ? x : big);
}
// erf: x P(x^2) / Q(x^2), fitted to a relative error of 2e-8, up to where it is 1 in single precision.
template <int N> static ALWAYS vec<N> erf_of(vec<N> x) {
  vec<N> y = at_most<N>(at_least<N>(x, -3.93f), 3.93f), s = y * y;
  vec<N> p = s * 2.025911954e-6f + 2.846863063e-4f;
  p = p * s + 3.808112117e-3f; p = p * s + 5.287529156e-2f; p = p * s + 1.915492117e-1f; p = p * s + 1.128379107f;
  vec<N> q = s * 3.783176726e-5f + 1.170713222e-3f;
  q = q * s + 1.505498961e-2f; q = q * s + 1.145591587e-1f; q = q * s + 5.030887127e-1f; q = q * s + 1.f;
  vec<N> r = y * p / q;
  r = x >= all<N>(3.925f) ? all<N>(1.f) : r;
  return x <= all<N>(-3.925f) ? all<N>(-1.f) : r;
}

// Threads: one team runs the whole network; stages are split statically and parted by barriers.
//
// At a barrier each thread tells another, then one twice as far away, and so on, until all have heard of all (dissemination): two threads
// tell one another. A flag has one who raises it and one who waits, and a cache line of its own; it only grows, whoever takes part.
constexpr int MOST_THREADS = 255, HOPS = 8;
template <class T> struct Atom {  // in sequence with all others, where nothing else is said
  T word;
  ALWAYS T load(int order = __ATOMIC_SEQ_CST) const { return __atomic_load_n(&word, order); }
  ALWAYS void store(T now, int order = __ATOMIC_SEQ_CST) { __atomic_store_n(&word, now, order); }
  ALWAYS void add(T more) { __atomic_fetch_add(&word, more, __ATOMIC_SEQ_CST); }
};
struct alignas(64) Flag { Atom<int64_t> round{0}; Atom<int> asleep{0}; };
struct Team { Flag flags[MOST_THREADS][HOPS]; int64_t round = 0; };
struct Run { Team* team; int id, count; float* const* at; mutable int64_t round = 0; };  // at[0] the arena, at[1] packed weights, then arguments and results

static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

static inline long now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}
// Waits until a word is as wanted: awake for a while, then asleep, so that whoever it waits for can have the processor.
template <class T, class F> static inline void wait_for(Atom<T>& word, const F& is_wanted, Atom<int>& asleep, long awake_ns) {
  long until = 0;
  for (int spins = 1; !is_wanted(word.load(__ATOMIC_ACQUIRE)); spins++) {
    relax();
    if (spins % 64) continue;
    long now = now_ns();
    if (!until) until = now + awake_ns;
    if (now < until) continue;
    asleep.add(1);
    for (T seen; !is_wanted(seen = word.load());) syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, (int)seen, nullptr, nullptr, 0);  // its low half
    asleep.add(-1);
    return;
  }
}
static inline void wake(void* word, Atom<int>& asleep) {
  if (asleep.load()) syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

constexpr long AWAKE_NS = 100000;  // at a barrier
static inline void barrier(const Run& run) {
  if (run.count == 1) return;
  int64_t round = ++run.round;
  for (int hop = 0, far = 1; far < run.count; hop++, far *= 2) {
    Flag &other = run.team->flags[(run.id + far) % run.count][hop], &mine = run.team->flags[run.id][hop];
    other.round.store(round);
    wake(&other.round, other.asleep);
    wait_for(mine.round, [&](int64_t now) { return now >= round; }, mine.asleep, AWAKE_NS);
  }
}
struct Share { long begin, end; };
static ALWAYS Share share_of(long n, int id, int count) { return {n * id / count, n * (id + 1) / count}; }

// Where a share of `n` units begins: at an outer one, of `inner` units, if it is as large then but for a twentieth.
static ALWAYS long border_of(long n, long inner, int id, int count) {
  long at = n * id / count, beyond = at % inner, slack = n / (20 * count);
  return beyond <= slack ? at - beyond : inner - beyond <= slack ? at - beyond + inner : at;
}
static ALWAYS Share share_of(long n, long inner, int id, int count) { return {border_of(n, inner, id, count), border_of(n, inner, id + 1, count)}; }

// A share of outer x inner units, one after the other, as at most three rectangles.
struct Rectangle { Share outer, inner; };
struct Rectangles {
  Rectangle each[3];
  int count = 0;
  ALWAYS Rectangles(Share share, long inner) {
    long first = share.begin / inner, last = share.end / inner, head = share.begin % inner, tail = share.end % inner;
    if (first == last) { each[count++] = {{first, first + 1}, {head, tail}}; return; }
    if (head) each[count++] = {{first, first + 1}, {head, inner}}, first++;
    if (first < last) each[count++] = {{first, last}, {0, inner}};
    if (tail) each[count++] = {{last, last + 1}, {0, tail}};
  }
  const Rectangle* begin() const { return each; }
  const Rectangle* end() const { return each + count; }
};

constexpr int whole_vectors(int n) { return n / L + (n % L > L / 2); }
constexpr int half_vector(int n) { return n % L > 0 && n % L <= L / 2; }
constexpr int width(int n) { return whole_vectors(n) * L + half_vector(n) * (L / 2); }

// The taps of a convolution, or of a product, which has one.
template <int KH_, int KW_, int CI_, int SY_, int SX_, int SC_, int ROW_> struct Taps {
  static constexpr int KH = KH_, KW = KW_, CI = CI_, SY = SY_, SX = SX_, SC = SC_, ROW = ROW_, COUNT = KH_ * KW_ * CI_;
};

// Tiles of many rows have the time to ask for weights ahead; past the end as well, which is no read.
constexpr int CACHE_LINE = 16, AHEAD = 32 * CACHE_LINE, TALL = 6;

// MR rows by NV vectors and H half ones: the register tile. `a` is the first row's first tap; the panel has the bias first.
template <class T, int MR, int NV, int H, int N, bool EXACT, class E>
static ALWAYS void tile(const float* __restrict a, const float* __restrict w, const E& e, float* __restrict out, long row, int column, long step) {
  constexpr int W = NV * L + H * (L / 2), HL = L / 2;
  asm volatile("" : "+r"(w));  // or compilers keep the bias in registers for the next tile, and weights in memory
  vec<L> acc[MR][NV ? NV : 1];
  vec<HL> rest[MR];
  for (int v = 0; v < NV; v++) { vec<L> b = load<L>(w + v * L); for (int r = 0; r < MR; r++) acc[r][v] = b; }
  if constexpr (H) { vec<HL> b = load<HL>(w + NV * L); for (int r = 0; r < MR; r++) rest[r] = b; }
  w += W;
  for (int y = 0; y < T::KH; y++)
    for (int x = 0; x < T::KW; x++) {
      const float* __restrict p = a + y * T::SY + x * T::SX;
      for (int c = 0; c < T::CI; c++, w += W) {
        if constexpr (MR >= TALL) for (int v = 0; v < W; v += CACHE_LINE) __builtin_prefetch(w + v + AHEAD);
        vec<L> b[NV ? NV : 1];
        for (int v = 0; v < NV; v++) b[v] = load<L>(w + v * L);
        vec<HL> h;
        if constexpr (H) h = load<HL>(w + NV * L);
#pragma GCC unroll 32
        for (int r = 0; r < MR; r++) {
          vec<L> s = all<L>(p[(long)r * T::ROW + (long)c * T::SC]);
#pragma GCC unroll 8
          for (int v = 0; v < NV; v++) acc[r][v] += s * b[v];
          if constexpr (H) rest[r] += lower(s) * h;  // no broadcast of its own: that is done where products are
        }
      }
    }
#pragma GCC unroll 32
  for (int r = 0; r < MR; r++) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
      vec<L> f = e.template operator()<L>(acc[r][v], row + r, column + v * L);
      float* to = out + r * step + column + v * L;
      if constexpr (EXACT && !H && N % L != 0) { if (v == NV - 1 && column + W > N) { store_some<N % L, L>(to, f); continue; } }
      store<L>(to, f);
    }
    if constexpr (H) {
      vec<HL> f = e.template operator()<HL>(rest[r], row + r, column + NV * L);
      float* to = out + r * step + column + NV * L;
      if constexpr (EXACT) store_some<N % L, HL>(to, f); else store<HL>(to, f);
    }
  }
}

// The same as a function of its own: within a loop over tiles GCC keeps the accumulators of several taps in memory, at half the speed.
template <class T, int MR, int NV, int H, int N, bool EXACT, class E>
static __attribute__((noinline)) void tile_apart(const float* a, const float* w, const E& e, float* out, long row, int column, long step) {
  tile<T, MR, NV, H, N, EXACT>(a, w, e, out, row, column, step);
}

// Rows in register tiles; those that are left over at the end of all are TAIL.
template <class T, int MR, int TAIL, int NV, int H, int N, bool EXACT, class E>
static __attribute__((noinline)) void tiles(const float* a, const float* w, const E& e, float* out, long row, long rows, int column, long step) {
  long r = 0;
  for (; r + MR <= rows; r += MR) {
    if constexpr (T::KH * T::KW > 1) tile_apart<T, MR, NV, H, N, EXACT>(a + r * T::ROW, w, e, out + r * step, row + r, column, step);
    else tile<T, MR, NV, H, N, EXACT>(a + r * T::ROW, w, e, out + r * step, row + r, column, step);
  }
  if constexpr (TAIL > 0) if (r < rows) tile<T, TAIL, NV, H, N, EXACT>(a + r * T::ROW, w, e, out + r * step, row + r, column, step);
}

// One panel of NV vectors; the last may be smaller, or have the half vector beside them.
template <class T, int MR, int TAIL, int NV, int N, bool EXACT, class E>
static ALWAYS void panel(const float* a, const float* w, const E& e, float* out, long row, long rows, int p, long step) {
  constexpr int ALL = whole_vectors(N), H = half_vector(N), FULL = ALL / NV, LAST = ALL % NV;
  const float* at = w + (long)p * NV * L * (T::COUNT + 1);
  if (p < FULL - (LAST == 0 && H ? 1 : 0)) tiles<T, MR, TAIL, NV, 0, N, EXACT>(a, at, e, out, row, rows, p * NV * L, step);
  else if constexpr (LAST == 0 && H) {
    if constexpr (FULL > 0) tiles<T, MR, TAIL, NV, 1, N, EXACT>(a, at, e, out, row, rows, p * NV * L, step);
    else tiles<T, MR, TAIL, 0, 1, N, EXACT>(a, at, e, out, row, rows, p * NV * L, step);
  } else if constexpr (LAST > 0) tiles<T, MR, TAIL, LAST, H, N, EXACT>(a, at, e, out, row, rows, p * NV * L, step);
}
template <int NV, int N> constexpr int panels() { return whole_vectors(N) / NV + (whole_vectors(N) % NV || (whole_vectors(N) < NV && half_vector(N)) ? 1 : 0); }

// Where the share of thread `id` begins, in register tiles: by panels or by rows, one after the other, so that all do as much arithmetic.
template <long ROWS, int N, int MR, int NV, bool BY_PANELS> static long border(int id, int count) {
  constexpr long P = panels<NV, N>(), TILES = (ROWS + MR - 1) / MR, VECTORS = whole_vectors(N) + half_vector(N), FULL = BY_PANELS ? ROWS * NV : MR * VECTORS;
  if (id == count) return P * TILES;
  long work = border_of(ROWS * VECTORS, FULL, id, count), outer = work / FULL;
  if (BY_PANELS && outer > P - 1) outer = P - 1;  // which may have half a vector more
  long rest = work - outer * FULL;
  if (BY_PANELS) {
    long vectors = outer == P - 1 ? VECTORS - outer * NV : NV, inner = (2 * rest + vectors * MR) / (2 * vectors * MR);
    return outer * TILES + (inner < TILES ? inner : TILES);
  }
  long rows = outer == TILES - 1 ? ROWS - outer * MR : MR, inner = (2 * rest + rows * NV) / (2 * rows * NV);
  return outer * P + (inner < P ? inner : P);
}

// [ROWS, K] by [K, N]: threads share rows, or panels where the weights are what is moved most.
template <class T, long ROWS, int N, int MR, int NV, int BLOCK, bool BY_PANELS, bool EXACT, class E>
static void product(const Run& run, const float* a, const float* w, const E& e, float* out, long step) {
  Share share{border<ROWS, N, MR, NV, BY_PANELS>(run.id, run.count), border<ROWS, N, MR, NV, BY_PANELS>(run.id + 1, run.count)};
  for (auto [outer, inner] : Rectangles(share, BY_PANELS ? (ROWS + MR - 1) / MR : panels<NV, N>())) {
    Share tiles = BY_PANELS ? inner : outer, part = BY_PANELS ? outer : inner;
    long end = tiles.end * MR < ROWS ? tiles.end * MR : ROWS;
    for (long r = tiles.begin * MR; r < end; r += BLOCK) {
      long count = end - r < BLOCK ? end - r : BLOCK;
      for (int p = part.begin; p < part.end; p++) panel<T, MR, ROWS % MR, NV, N, EXACT>(a + r * T::ROW, w, e, out + r * step, r, count, p, step);
    }
  }
}

template <class E> struct Shifted {  // the epilogue of a group
  const E& e;
  int by;
  template <int N> ALWAYS vec<N> operator()(vec<N> v, long row, int column) const { return e.template operator()<N>(v, row, column + by); }
};

// A convolution whose input has its padding around it: IMAGE floats to the next image, LINE to the next row of the result.
template <class T, int IMAGES, long IMAGE, int OH, int OW, int LINE, int N, int GROUPS, int GROUP, int MR, int NV, bool BY_PANELS, bool EXACT, class E>
static void convolution(const Run& run, const float* a, const float* w, const E& e, float* out, long step) {
  constexpr int P = panels<NV, N>();
  constexpr long PACKED = (long)width(N) * (T::COUNT + 1), LINES = (long)IMAGES * OH;
  auto one = [&](long y, int at) {
    int g = at / P, p = at % P;
    Shifted<E> shifted{e, g * N};
    panel<T, MR, OW % MR, NV, N, EXACT>(a + (y / OH) * IMAGE + (y % OH) * (long)LINE + (long)g * GROUP, w + g * PACKED, shifted, out + y * OW * step + g * N, y * OW, OW, p, step);
  };
  for (auto [outer, inner] : Rectangles(share_of(LINES * P * GROUPS, BY_PANELS ? LINES : P * GROUPS, run.id, run.count), BY_PANELS ? LINES : P * GROUPS))
    for (long i = outer.begin; i < outer.end; i++)
      for (long j = inner.begin; j < inner.end; j++) one(BY_PANELS ? j : i, BY_PANELS ? i : j);
}

// Puts zeros around an image: [C, IH, IW] with strides (SC, SY, SX) into rows of IW + 2 PW, channels first (PLANAR) or last.
template <int IMAGES, long IMAGE, int C, int IH, int IW, int PH, int PW, int SC, int SY, int SX, bool PLANAR, int OC>
static void pad(const Run& run, const float* in, float* out) {
  constexpr int H = IH + 2 * PH, W = IW + 2 * PW;
  if constexpr (PLANAR) {
    Share share = share_of((long)IMAGES * C * H, run.id, run.count);
    for (long i = share.begin; i < share.end; i++) {
      long y = i % H - PH, c = i / H % C, n = i / H / C;
      float* to = out + i * W;
      if (y < 0 || y >= IH) { memset(to, 0, W * 4); continue; }
      const float* from = in + n * IMAGE + c * (long)SC + y * (long)SY;
      for (int x = 0; x < PW; x++) to[x] = to[PW + IW + x] = 0.f;
      if constexpr (SX == 1) memcpy(to + PW, from, IW * 4);
      else for (int x = 0; x < IW; x++) to[PW + x] = from[(long)x * SX];
    }
  } else {
    Share share = share_of((long)IMAGES * H, run.id, run.count);
    for (long i = share.begin; i < share.end; i++) {
      long y = i % H - PH, n = i / H;
      float* to = out + i * W * OC;
      if (y < 0 || y >= IH) { memset(to, 0, (long)W * OC * 4); continue; }
      const float* from = in + n * IMAGE + y * (long)SY;
      memset(to, 0, PW * OC * 4);
      memset(to + (PW + IW) * OC, 0, PW * OC * 4);
      for (int x = 0; x < IW; x++) {
        if constexpr (SC == 1) memcpy(to + (PW + x) * OC, from + (long)x * SX, C * 4);
        else for (int c = 0; c < C; c++) to[(PW + x) * OC + c] = from[(long)x * SX + (long)c * SC];
      }
    }
  }
}

// A window over an image whose channels lie side by side.
template <int KH_, int KW_, int SH_, int SW_, int DH_, int DW_, int PH_, int PW_, int IH_, int IW_, int OH_, int OW_, int IS_> struct Window {
  static constexpr int KH = KH_, KW = KW_, SH = SH_, SW = SW_, DH = DH_, DW = DW_, PH = PH_, PW = PW_, IH = IH_, IW = IW_, OH = OH_, OW = OW_, IS = IS_;
  static constexpr int LEFT = (PW + SW - 1) / SW < OW ? (PW + SW - 1) / SW : OW;  // results from here on read nothing left of the image
  static constexpr int INNER = IW + PW - (KW - 1) * DW - 1;  // the last result that reads nothing right of it, times SW
  static constexpr int RIGHT = INNER < 0 ? LEFT : INNER / SW + 1 < LEFT ? LEFT : INNER / SW + 1 < OW ? INNER / SW + 1 : OW;
};

// Depthwise convolution: XB results side by side, the taps of a row in registers. Weights: for each vector of channels the bias, then taps.
struct Weighted {
  template <class G, int N, int XB> static ALWAYS void inner(vec<N>* acc, const float* p, const float* w, int from, int to) {
    for (int b = 0; b < XB; b++) acc[b] = load<N>(w);
    for (int y = from; y < to; y++) {
      const float* line = p + (long)y * G::DH * G::IW * G::IS;
      vec<N> k[G::KW];
      for (int x = 0; x < G::KW; x++) k[x] = load<N>(w + (1 + y * G::KW + x) * N);
#pragma GCC unroll 16
      for (int b = 0; b < XB; b++)
#pragma GCC unroll 16
        for (int x = 0; x < G::KW; x++) acc[b] += load<N>(line + (b * G::SW + x * G::DW) * G::IS) * k[x];
    }
  }
  template <class G, int N> static ALWAYS vec<N> edge(const float* p, const float* w, int from, int to, int left, int right) {
    vec<N> acc = load<N>(w);
    for (int y = from; y < to; y++)
      for (int x = left; x < right; x++) acc += load<N>(p + ((long)y * G::DH * G::IW + x * G::DW) * G::IS) * load<N>(w + (1 + y * G::KW + x) * N);
    return acc;
  }
  static constexpr bool weights = true;
};
struct Largest {
  template <class G, int N, int XB> static ALWAYS void inner(vec<N>* acc, const float* p, const float*, int from, int to) {
    for (int b = 0; b < XB; b++) acc[b] = edge<G, N>(p + b * G::SW * G::IS, nullptr, from, to, 0, G::KW);
  }
  template <class G, int N> static ALWAYS vec<N> edge(const float* p, const float*, int from, int to, int left, int right) {
    vec<N> acc = all<N>(-INFINITY);
    for (int y = from; y < to; y++)
      for (int x = left; x < right; x++) acc = larger<N>(load<N>(p + ((long)y * G::DH * G::IW + x * G::DW) * G::IS), acc);
    return acc;
  }
  static constexpr bool weights = false;
};
template <int DIVISOR> struct Average {  // 0: as many as lie within the image
  template <class G, int N, int XB> static ALWAYS void inner(vec<N>* acc, const float* p, const float*, int from, int to) {
    for (int b = 0; b < XB; b++) acc[b] = edge<G, N>(p + b * G::SW * G::IS, nullptr, from, to, 0, G::KW);
  }
  template <class G, int N> static ALWAYS vec<N> edge(const float* p, const float*, int from, int to, int left, int right) {
    vec<N> acc = all<N>(0.f);
    for (int y = from; y < to; y++)
      for (int x = left; x < right; x++) acc += load<N>(p + ((long)y * G::DH * G::IW + x * G::DW) * G::IS);
    return acc / (float)(DIVISOR ? DIVISOR : (to - from) * (right - left));
  }
  static constexpr bool weights = false;
};
static ALWAYS int rounded_up(int a, int b) { return a <= 0 ? 0 : (a + b - 1) / b; }

// One row of results for N channels. `in` is the image's first pixel, `out` the row's first.
template <class K, class G, int N, int XB, bool EXACT, int C, class E>
static ALWAYS void window_row(const float* in, const float* w, const E& e, float* out, int oy, long row, int column, long step) {
  int top = oy * G::SH - G::PH, from = rounded_up(-top, G::DH), to = rounded_up(G::IH - top, G::DH);
  if (to > G::KH) to = G::KH;
  const float* base = in + (long)top * G::IW * G::IS - (long)G::PW * G::IS;
  auto put = [&](int x, vec<N> v) {
    vec<N> f = e.template operator()<N>(v, row + x, column);
    if constexpr (EXACT && C % N != 0) { if (column + N > C) { store_some<C % N, N>(out + x * step, f); return; } }
    store<N>(out + x * step, f);
  };
  auto edges = [&](int x, int end) {
    for (; x < end; x++) {
      int at = x * G::SW - G::PW, left = rounded_up(-at, G::DW), right = rounded_up(G::IW - at, G::DW);
      put(x, K::template edge<G, N>(base + (long)x * G::SW * G::IS, w, from, to, left, right < G::KW ? right : G::KW));
    }
  };
  auto some = [&]<int B>(int x) {
    vec<N> acc[B];
    K::template inner<G, N, B>(acc, base + (long)x * G::SW * G::IS, w, from, to);
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
static ALWAYS void window_part(const float* in, const float* w, const E& e, float* out, int oy, long row, int part, long step) {
  constexpr int H = half_vector(C), W = whole_vectors(C);
  const float* at = K::weights ? w + (long)part * L * (1 + G::KH * G::KW) : nullptr;
  if (part < W) window_row<K, G, L, XB, EXACT, C>(in + part * L, at, e, out + part * L, oy, row, part * L, step);
  else if constexpr (H) window_row<K, G, L / 2, XB, EXACT, C>(in + W * L, at, e, out + W * L, oy, row, W * L, step);
}

// All images: threads share rows, or vectors of channels.
template <class K, class G, int IMAGES, long IMAGE, int C, int XB, bool BY_CHANNELS, bool EXACT, class E>
static void windows(const Run& run, const float* in, const float* w, const E& e, float* out, long step) {
  constexpr int PARTS = whole_vectors(C) + half_vector(C);
  constexpr long LINES = (long)IMAGES * G::OH;
  auto one = [&](long y, int part) __attribute__((always_inline)) {
    window_part<K, G, C, XB, EXACT>(in + y / G::OH * IMAGE, w, e, out + y * G::OW * step, y % G::OH, y * G::OW, part, step);
  };
  for (auto [outer, inner] : Rectangles(share_of(LINES * PARTS, BY_CHANNELS ? LINES : PARTS, run.id, run.count), BY_CHANNELS ? LINES : PARTS)) {
    Share rows = BY_CHANNELS ? inner : outer, parts = BY_CHANNELS ? outer : inner;
    if constexpr (BY_CHANNELS || (PARTS >= 8 && G::OH < 32)) { for (int p = parts.begin; p < parts.end; p++) for (long y = rows.begin; y < rows.end; y++) one(y, p); }
    else { for (long y = rows.begin; y < rows.end; y++) for (int p = parts.begin; p < parts.end; p++) one(y, p); }
  }
}

// Calls f with vectors, then a half one, then single lanes: `f.template operator()<N>(j)`.
template <class F> static ALWAYS void along(long n, const F& f) {
  long j = 0;
  for (; j + L <= n; j += L) f.template operator()<L>(j);
  if (j + L / 2 <= n) { f.template operator()<L / 2>(j); j += L / 2; }
  for (; j < n; j++) f.template operator()<1>(j);
}

// A square of vectors, its rows and columns exchanged: blocks off the diagonal, then blocks within these.
template <int S, int N> static ALWAYS void exchanged(vec<N> (&v)[N]) {
  if constexpr (S > 0) {
    for (int i = 0; i < N; i++) {
      if (i & S) continue;
      [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
        vec<N> a = v[i], b = v[i + S];
        v[i] = __builtin_shufflevector(a, b, (I & S ? I - S + N : I)...);
        v[i + S] = __builtin_shufflevector(a, b, (I & S ? I + N : I + S)...);
      }(std::make_integer_sequence<int, N>{});
    }
    exchanged<S / 2, N>(v);
  }
}

// out[r * out_step + c] = f(in[c * in_step + r]), for `outer` such matrices, which `at` finds; tile by tile, along the longer side.
template <long ROWS, long COLUMNS, class A, class F>
static void turned(const Run& run, long outer, const A& at, const float* in, long in_step, float* out, long out_step, const F& f) {
  constexpr bool TALL = ROWS > COLUMNS;
  constexpr long LONG = TALL ? ROWS : COLUMNS, SHORT = TALL ? COLUMNS : ROWS, TILES = (LONG + L - 1) / L;
  Share share = share_of(outer * TILES, run.id, run.count);
  for (long first = share.begin; first < share.end;) {
    long i = first / TILES, begin = first % TILES, end = begin + (share.end - first) < TILES ? begin + (share.end - first) : TILES;
    long to = 0, from = 0;
    at(i, to, from);
    for (long s = 0; s < SHORT; s += L) {
      for (long l = begin * L; l < end * L && l < LONG; l += L) {
        long r = TALL ? l : s, c = TALL ? s : l;
        const float* p = in + from + c * in_step + r;
        float* q = out + to + r * out_step + c;
        if (r + L <= ROWS && c + L <= COLUMNS) {
          vec<L> v[L];
          for (int k = 0; k < L; k++) v[k] = f.template operator()<L>(load<L>(p + k * in_step));
          exchanged<L / 2, L>(v);
          for (int k = 0; k < L; k++) store<L>(q + k * out_step, v[k]);
        } else {
          for (long y = 0; y < L && r + y < ROWS; y++)
            for (long x = 0; x < L && c + x < COLUMNS; x++) q[y * out_step + x] = f.template operator()<1>(load<1>(p + x * in_step + y))[0];
        }
      }
    }
    first += end - begin;
  }
}

// The mean over the rows of each image.
template <int IMAGES, long IMAGE, long ROWS, int C, int IS, class E>
static void mean_of_rows(const Run& run, const float* in, const E& e, float* out, long step) {
  constexpr int PARTS = (C + L - 1) / L;
  Share share = share_of((long)IMAGES * PARTS, run.id, run.count);
  for (long i = share.begin; i < share.end; i++) {
    long n = i / PARTS, c = i % PARTS * L;
    auto some = [&]<int N>(long j) __attribute__((always_inline)) {
      const float* p = in + n * IMAGE + c + j;
      vec<N> sum[4] = {};
      long r = 0;
      for (; r + 4 <= ROWS; r += 4) for (int k = 0; k < 4; k++) sum[k] += load<N>(p + (r + k) * IS);
      for (; r < ROWS; r++) sum[0] += load<N>(p + r * IS);
      store<N>(out + n * step + c + j, e.template operator()<N>((sum[0] + sum[1] + (sum[2] + sum[3])) / (float)ROWS, n, c + j));
    };
    along(C - c < L ? C - c : L, some);
  }
}

// All lanes put together by a function of two vectors, halves first.
template <int N, class F> static ALWAYS float folded(vec<N> v, const F& f) {
  if constexpr (N == 1) return v[0];
  else {
    return [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
      vec<N / 2> low = __builtin_shufflevector(v, v, I...), high = __builtin_shufflevector(v, v, (I + N / 2)...);
      return folded<N / 2>(f.template operator()<N / 2>(low, high), f);
    }(std::make_integer_sequence<int, N / 2>{});
  }
}
static ALWAYS float sum_of(vec<L> v) { return folded<L>(v, []<int N>(vec<N> a, vec<N> b) __attribute__((always_inline)) { return a + b; }); }

// Layer norms: each row by itself.
template <long ROWS, int C, int IS, class E>
static void norm_rows(const Run& run, const float* in, const E& e, float* out, long step, float eps) {
  Share share = share_of(ROWS, run.id, run.count);
  for (long r = share.begin; r < share.end; r++) {
    const float* p = in + r * IS;
    vec<L> many = {};
    float few = 0;
    along(C, [&]<int N>(long j) __attribute__((always_inline)) { if constexpr (N == L) many += load<N>(p + j); else for (int i = 0; i < N; i++) few += p[j + i]; });
    float mean = (sum_of(many) + few) / C;
    many = vec<L>{};
    few = 0;
    along(C, [&]<int N>(long j) __attribute__((always_inline)) {
      vec<N> d = load<N>(p + j) - mean;
      if constexpr (N == L) many += d * d; else for (int i = 0; i < N; i++) few += d[i] * d[i];
    });
    float rstd = 1.f / __builtin_sqrtf((sum_of(many) + few) / C + eps);
    along(C, [&]<int N>(long j) __attribute__((always_inline)) { store<N>(out + r * step + j, e.template operator()<N>((load<N>(p + j) - mean) * rstd, r, j)); });
  }
}
