// The two inner loops of attention, as blocks of R rows by N registers whose sums stay in registers.
//
//   scores   S[r][token]   = sum over d of      q[r][d] * key[d][token]
//   values   O[r][d]      += sum over tokens of p[r][token] * value[token][d]
//
// Both add one register-wide product after another in ascending order of the summed index, so that a row's bits do not
// depend on R, N or the rows beside it.
#pragma once
#include <cstddef>

#include "layout.h"
#include "tiles.h"

namespace bi {

#if defined(__AVX512F__)
constexpr int MAX_R = 6, MAX_N = 4;  // 24 of 32 registers hold sums
#else
constexpr int MAX_R = 4, MAX_N = 2;  // 8 of 16
#endif

struct F32Cache {
  static constexpr Kind KIND = F32;
  static constexpr int PAIR = 1;  // numbers a word
  typedef float Word;             // of the cache
  typedef float Left;             // of queries and weights
  static constexpr float DROP = 1.0f;  // see I8Cache
  static void load_left(Left* to, const float* from, int n) { memcpy(to, from, n * sizeof(float)); }
  static void load_left(Left* to, const uint16_t* from, int n) {
#pragma omp simd
    for (int i = 0; i < n; i++) to[i] = from_bf16(from[i]);
  }
  static void store_left(Left* p, vf x) { store(p, x); }
  static void mask(Word*, int, bool, bool) {}

  template <int R, int N>
  static inline __attribute__((always_inline)) void step(vf (&sum)[R][N], const Word* const (&right)[N],
                                                         const Left* left, ptrdiff_t stride) {
    vf x[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) x[n] = load(right[n]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vf y = splat(left[r * stride]);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sum[r][n] = fma(y, x[n], sum[r][n]);
    }
  }
};

// A word of bf16 is two numbers that lie beside each other in the summed index: the first in its low half.
struct BF16Cache {
  static constexpr Kind KIND = BF16;
  static constexpr float LIFT = 1.0f, DROP = 1.0f;  // see I8Cache
  static constexpr int PAIR = 2;
  typedef uint32_t Word;

  // Zero one half of each of n words: the token of a pair that a row may not see could hold a stale inf or NaN.
  static void mask(Word* words, int n, bool keep_first, bool keep_second) {
    const Word kept = (keep_first ? 0x0000ffffu : 0u) | (keep_second ? 0xffff0000u : 0u);
    for (int i = 0; i < n; i++) words[i] &= kept;
  }

#if defined(__AVX512BF16__)
  typedef uint16_t Left;
  static void load_left(Left* to, const uint16_t* from, int n) { memcpy(to, from, n * sizeof(uint16_t)); }
  static void load_left(Left* to, const float* from, int n) {
#pragma omp simd
    for (int i = 0; i < n; i++) to[i] = to_bf16(from[i]);
  }
  static void store_left(Left* p, vf x) {
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
  }

  template <int R, int N>
  static inline __attribute__((always_inline)) void step(vf (&sum)[R][N], const Word* const (&right)[N],
                                                         const Left* left, ptrdiff_t stride) {
    __m512bh x[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) x[n] = (__m512bh)_mm512_loadu_si512(right[n]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t pair;
      memcpy(&pair, left + r * stride, 4);
      const __m512bh y = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sum[r][n] = (vf)_mm512_dpbf16_ps((__m512)sum[r][n], x[n], y);
    }
  }
#else
  typedef float Left;
  static void load_left(Left* to, const float* from, int n) { memcpy(to, from, n * sizeof(float)); }
  static void load_left(Left* to, const uint16_t* from, int n) {
#pragma omp simd
    for (int i = 0; i < n; i++) to[i] = from_bf16(from[i]);
  }
  static void store_left(Left* p, vf x) { store(p, x); }

  template <int R, int N>
  static inline __attribute__((always_inline)) void step(vf (&sum)[R][N], const Word* const (&right)[N],
                                                         const Left* left, ptrdiff_t stride) {
    vf first[N], second[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      const vu word = load(right[n]);
      first[n] = as_float(word << 16);
      second[n] = as_float(word & 0xffff0000u);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vf y = splat(left[r * stride]), z = splat(left[r * stride + 1]);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sum[r][n] = fma(z, second[n], fma(y, first[n], sum[r][n]));
    }
  }
#endif
};

// INT8 is multiplied as bf16, in which it is exact; scales go to the scores and to the weights.
struct I8Cache : BF16Cache {
  static constexpr Kind KIND = I8;
#if BI_FLOAT16
  // A float16 is a bf16 whose exponent is 112 too small, once its mantissa is shortened: numbers come out times 2^-112,
  // which is exact. So queries and weights are multiplied by LIFT, and sums by DROP: exact below 2^28.
  static constexpr float LIFT = 0x1p100f, DROP = 0x1p12f;
#endif

  // n numbers (a multiple of 32) in the order in which they lie.
#if BI_FLOAT16
  __attribute__((target("avx512fp16")))
#endif
  static void expand(const int8_t* from, uint16_t* to, int64_t n) {
#if BI_FLOAT16
    const __m512i kept = _mm512_set1_epi16((short)0x8fff);  // the shift leaves copies of the sign in the exponent
    for (int64_t i = 0; i < n; i += 32) {
      const __m512i whole = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(from + i)));
      const __m512i half = _mm512_castph_si512(_mm512_cvtepi16_ph(whole));
      _mm512_storeu_si512(to + i, _mm512_and_si512(_mm512_srai_epi16(half, 3), kept));
    }
#elif defined(__AVX512F__)
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
                                         31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    for (int64_t i = 0; i < n; i += 32) {
      const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + i)));
      const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + i + 16)));
      _mm512_storeu_si512(to + i, _mm512_permutex2var_epi16(_mm512_castps_si512(_mm512_cvtepi32_ps(low)), odd,
                                                            _mm512_castps_si512(_mm512_cvtepi32_ps(high))));
    }
#else
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
      const float x = (float)from[i];
      uint32_t bits;
      memcpy(&bits, &x, 4);
      to[i] = (uint16_t)(bits >> 16);
    }
#endif
  }
};

// columns[n]: the first word of W tokens' keys; `steps` words of 16 tokens follow each other.
template <class C, int R, int N>
static void score_block(const typename C::Left* q, ptrdiff_t q_stride, const typename C::Word* const* columns,
                        int steps, float* scores, ptrdiff_t stride) {
  vf sum[R][N] = {};
  const typename C::Word* right[N];
  for (int i = 0; i < steps; i++) {
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) right[n] = columns[n] + i * TILE;
    C::template step<R, N>(sum, right, q + i * C::PAIR, q_stride);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(scores + r * stride + n * W, sum[r][n]);
}

// rows[i]: the words of token (pair) i, from which those at `column` are taken.
template <class C, int R, int N>
static void value_block(const typename C::Left* p, ptrdiff_t p_stride, const typename C::Word* const* rows, int begin,
                        int end, int column, float* out, ptrdiff_t stride) {
  vf sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sum[r][n] = load(out + r * stride + column + n * W);
  const typename C::Word* right[N];
  for (int i = begin; i < end; i++) {
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) right[n] = rows[i] + column + n * W;
    C::template step<R, N>(sum, right, p + i * C::PAIR, p_stride);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(out + r * stride + column + n * W, sum[r][n]);
}

// The instantiation for a number of rows, chosen at run time.
template <class C, int N>
struct Blocks {
  typedef decltype(&score_block<C, 1, N>) Score;
  typedef decltype(&value_block<C, 1, N>) Value;
#if defined(__AVX512F__)
  static constexpr Score score[] = {nullptr,           score_block<C, 1, N>, score_block<C, 2, N>, score_block<C, 3, N>,
                                    score_block<C, 4, N>, score_block<C, 5, N>, score_block<C, 6, N>};
  static constexpr Value value[] = {nullptr,           value_block<C, 1, N>, value_block<C, 2, N>, value_block<C, 3, N>,
                                    value_block<C, 4, N>, value_block<C, 5, N>, value_block<C, 6, N>};
#else
  static constexpr Score score[] = {nullptr, score_block<C, 1, N>, score_block<C, 2, N>, score_block<C, 3, N>,
                                    score_block<C, 4, N>};
  static constexpr Value value[] = {nullptr, value_block<C, 1, N>, value_block<C, 2, N>, value_block<C, 3, N>,
                                    value_block<C, 4, N>};
#endif
};

}  // namespace bi
