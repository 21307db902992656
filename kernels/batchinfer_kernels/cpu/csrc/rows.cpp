// Writing a row: conversion, and per-row INT8 with optional smoothing and block-Hadamard rotation.
#include "rows.h"

namespace bi {

template <int H>
static inline vf butterfly(vf x) {  // within a register: x[i] + x[i + H] and x[i] - x[i + H]
  const vf sign = (lanes() & H) != 0 ? splat(-1.0f) : splat(1.0f);
  return fma(x, sign, swap_lanes<H>(x));
}

// Levels of registers: v[i] + v[i + half] and v[i] - v[i + half] for half = 1, 2, 4 ..
template <int N>
static inline __attribute__((always_inline)) void butterflies(vf (&v)[N]) {
#pragma GCC unroll 8
  for (int half = 1; half < N; half *= 2)
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      if (i & half) continue;
      const vf low = v[i], high = v[i + half];
      v[i] = low + high;
      v[i + half] = low - high;
    }
}

// Strides below N registers, of numbers times `by` (null: ones) and `scale`.
template <int N>
static inline void near_levels(float* x, int64_t n, int block, const float* by, vf scale) {
  for (int64_t i = 0; i < n; i += N * W) {
    vf v[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) {
      const int64_t at = i + j * W;
      v[j] = (by ? load(x + at) * load(by + at) : load(x + at)) * scale;
      if (block > 1) v[j] = butterfly<1>(v[j]);
      if (block > 2) v[j] = butterfly<2>(v[j]);
      if constexpr (W > 4)
        if (block > 4) v[j] = butterfly<4>(v[j]);
      if constexpr (W > 8)
        if (block > 8) v[j] = butterfly<8>(v[j]);
    }
    butterflies<N>(v);
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) store(x + i + j * W, v[j]);
  }
}

// Strides of half, 2 half .. N half / 2.
template <int N>
static inline void far_levels(float* x, int64_t n, int64_t half) {
  for (int64_t b = 0; b < n; b += N * half)
    for (float* first = x + b; first < x + b + half; first += W) {
      vf v[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) v[j] = load(first + j * half);
      butterflies<N>(v);
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) store(first + j * half, v[j]);
    }
}

// As many levels at a time as registers hold: each pass over the row costs more than a level.
void rotate(float* x, int64_t n, int block, const float* by) {
  const vf scale = splat(1.0f / std::sqrt((float)block));
  int64_t half = W;
  if (block >= 4 * W && n % (4 * W) == 0) {
    near_levels<4>(x, n, block, by, scale);
    half = 4 * W;
  } else {
    near_levels<1>(x, n, block, by, scale);
  }
  for (; 8 * half <= block; half *= 8) far_levels<8>(x, n, half);
  for (; 2 * half <= block; half *= 2) far_levels<2>(x, n, half);
}

// Symmetric INT8: scale = max|x| / 127. A row of zeros gets scale 0; a row with inf or NaN gets scale NaN, so that its
// products are NaN too instead of plausible numbers.
float quantize(const float* x, int64_t n, int8_t* out) {
  constexpr float smallest = 1e-30f;  // below it 127 / max would overflow
  uint32_t worst = 0;  // magnitudes are in the order of their bits
#pragma omp simd reduction(max : worst)
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    worst = worst > bits ? worst : bits;
  }
  const bool finite = worst < 0x7f800000u;
  float peak;
  memcpy(&peak, &worst, 4);
  if (!finite || peak < smallest) {
    memset(out, 0, n);
    return finite ? 0.0f : NAN;
  }
  const float inverse = 127.0f / peak;
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + W <= n; i += W)
    _mm_storeu_si128((__m128i*)(out + i), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)(load(x + i) * inverse))));
#endif
#pragma omp simd
  for (int64_t j = i; j < n; j++) out[j] = (int8_t)(int32_t)((x[j] * inverse + ROUND) - ROUND);
  return peak / 127.0f;
}

void emit_row(const Sink& out, int64_t row, float* x, int64_t n) {
  if (out.kind == F32) {
    memcpy((float*)out.data + row * n, x, n * sizeof(float));
    return;
  }
  if (out.kind == BF16) {
    uint16_t* p = (uint16_t*)out.data + row * n;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) p[i] = to_bf16(x[i]);
    return;
  }
  if (out.rotation > 1) {
    rotate(x, n, out.rotation, out.smoothing);
  } else if (out.smoothing) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] *= out.smoothing[i];
  }
  out.scale[row] = quantize(x, n, (int8_t*)out.data + row * n);
}

}  // namespace bi
