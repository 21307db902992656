// Writing a row: conversion, and per-row INT8 with optional smoothing and block-Hadamard rotation.
#include "rows.h"

namespace bi {

template <int H>
static inline vf butterfly(vf x) {  // within a register: x[i] + x[i + H] and x[i] - x[i + H]
  const vf sign = (lanes() & H) != 0 ? splat(-1.0f) : splat(1.0f);
  return fma(x, sign, swap_lanes<H>(x));
}

// Strides below a register's width inside registers, then pairs of registers.
void rotate(float* x, int64_t n, int block) {
  const vf scale = splat(1.0f / std::sqrt((float)block));
  for (int64_t i = 0; i < n; i += W) {
    vf v = load(x + i) * scale;
    if (block > 1) v = butterfly<1>(v);
    if (block > 2) v = butterfly<2>(v);
    if constexpr (W > 4)
      if (block > 4) v = butterfly<4>(v);
    if constexpr (W > 8)
      if (block > 8) v = butterfly<8>(v);
    store(x + i, v);
  }
  for (int half = W; half < block; half *= 2)
    for (int64_t b = 0; b < n; b += 2 * half)
      for (float* v = x + b; v < x + b + half; v += W) {
        const vf low = load(v), high = load(v + half);
        store(v, low + high);
        store(v + half, low - high);
      }
}

// Symmetric INT8: scale = max|x| / 127. A row of zeros gets scale 0; a row with inf or NaN gets scale NaN, so that its
// products are NaN too instead of plausible numbers.
float quantize(const float* x, int64_t n, int8_t* out) {
  constexpr float smallest = 1e-30f;  // below it 127 / max would overflow
  float peak = 0.0f;
  uint32_t worst = 0;
#pragma omp simd reduction(max : peak, worst)
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    worst = worst > bits ? worst : bits;
    float magnitude = std::fabs(x[i]);
    peak = peak > magnitude ? peak : magnitude;
  }
  const bool finite = worst < 0x7f800000u;
  if (!finite || peak < smallest) {
    memset(out, 0, n);
    return finite ? 0.0f : NAN;
  }
  const float inverse = 127.0f / peak;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) out[i] = (int8_t)(int32_t)((x[i] * inverse + ROUND) - ROUND);
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
  if (out.smoothing) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] *= out.smoothing[i];
  }
  if (out.rotation > 1) rotate(x, n, out.rotation);
  out.scale[row] = quantize(x, n, (int8_t*)out.data + row * n);
}

}  // namespace bi
