// One vector register of floats, as wide as the target has it. Everything else is written in terms of W.
//
// The build sets -ffp-contract=off, so a multiply and an add fuse only where fma() says so: the bits of a result never
// depend on which of several instantiations of a loop the compiler chose to contract.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// All else is hidden (-fvisibility=hidden): templates and inline tables of two variants loaded into one process would
// otherwise be taken for one another.
#define BI_EXPORT extern "C" __attribute__((visibility("default")))

namespace bi {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

// Asks for a cache line, which is to come as far as a core's second cache. Compilers drop loops of __builtin_prefetch.
static inline void ask_for(const void* line) {
#if defined(__x86_64__) || defined(__i386__)
  asm volatile("prefetcht1 %0" ::"m"(*(const char*)line));
#else
  __builtin_prefetch(line, 0, 2);
#endif
}

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef float vf_unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t vu_unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));

static inline vf load(const float* p) { return *(const vf_unaligned*)p; }
static inline vu load(const uint32_t* p) { return *(const vu_unaligned*)p; }
static inline void store(float* p, vf x) { *(vf_unaligned*)p = x; }
static inline vf splat(float x) { return vf{} + x; }
static inline vu splat(uint32_t x) { return vu{} + x; }
static inline vf as_float(vu x) { return (vf)x; }

// a * b + c, rounded once where the target can
static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// max that gives its second operand when either is NaN
static inline vf max(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// min that gives its second operand when either is NaN
static inline vf min(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// Whether a lane of a comparison's result is set.
static inline bool any(vi x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)x) != 0;
#else
  for (int i = 0; i < W; i++)
    if (x[i]) return true;
  return false;
#endif
}

static inline vi lanes() {
  vi x;
  for (int i = 0; i < W; i++) x[i] = i;
  return x;
}

// lane i of the result is lane i ^ H of x
template <int H>
static inline vf swap_lanes(vf x) {
#if defined(__clang__)
  vf y;
  for (int i = 0; i < W; i++) y[i] = x[i ^ H];
  return y;
#else
  return __builtin_shuffle(x, lanes() ^ H);
#endif
}

// Horizontal reductions in a fixed order.
static inline float sum_lanes(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float lane[W];
  store(lane, x);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
#endif
}
static inline float max_lanes(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float lane[W];
  store(lane, x);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  return lane[0];
#endif
}

// 2^f on [-1/2, 1/2] as 1 + f (C1 + f (C2 + ...)): the least relative error, 7e-8, among those that are 1 at 0.
constexpr float C1 = 0.693146596f, C2 = 0.24022166f, C3 = 0.055510478f, C4 = 0.00967495284f, C5 = 0.001320286f;
constexpr float LOG2_E = 1.44269504f;
constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits

// 2^(n + f) of n whole, which is kept in the low bits of `rounded`, and f in [-1/2, 1/2].
static inline vf power_of_two(vf rounded, vf f) {
  vf p = splat(C5);
  p = fma(p, f, splat(C4));
  p = fma(p, f, splat(C3));
  p = fma(p, f, splat(C2));
  p = fma(p, f, splat(C1));
  p = fma(p, f, splat(1.0f));
  return p * as_float(((vu)rounded + 127u) << 23);
}

// 2^x of x up to 0, exactly 1 at 0, with a relative error as exp's; below -126 it stays at 2^-126; NaN stays NaN.
static inline vf exp2_below(vf x) {
  x = max(splat(-126.0f), x);
  const vf rounded = x + ROUND;
  return power_of_two(rounded, x - (rounded - ROUND));
}

#if defined(__AVX512DQ__)
// The same for numbers that are rounded to bf16 next, in half the time: exactly 1 at 0, relative error below 2^-13 where
// bf16 has 2^-9; 0 where it is too small for a number.
static inline vf exp2_coarse(vf x) {
  constexpr float C1 = 0.69511682f, C2 = 0.22764485f, C3 = 0.077067174f;  // least relative error in [0, 1]
  const vf f = (vf)_mm512_reduce_ps((__m512)x, 0x09);                      // x - floor(x)
  const vf p = fma(fma(fma(splat(C3), f, splat(C2)), f, splat(C1)), f, splat(1.0f));
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);  // times 2^floor(x)
}
#endif

// e^x, exactly 1 at 0, relative error below 3e-7 (with fused operations); beyond 87 on either side it
// stays at e^87 and e^-87; NaN stays NaN.
static inline vf exp(vf x) {
  x = max(splat(-87.0f), min(splat(87.0f), x));
  const vf rounded = fma(x, splat(LOG2_E), splat(ROUND));
  return power_of_two(rounded, fma(x, splat(LOG2_E), ROUND - rounded));
}

}  // namespace bi
