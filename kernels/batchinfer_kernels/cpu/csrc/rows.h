// Rows of numbers in and out: what an op reads (a Source) and where it leaves its result (a Sink).
//
// Every op works on one row at a time as floats in a scratch buffer, of which a whole register past the end may be
// overwritten.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "simd.h"

namespace bi {

enum Kind : int32_t { F32 = 0, BF16 = 1, I32 = 2, I8 = 3 };

// A matrix: value = data[row * stride + column] * row_scale[row] * column_scale[column] + bias[column].
// Null pointers are ones (scales) and zeros (bias). The layout is mirrored in library.py.
struct Source {
  const void* data;
  int64_t stride;
  const float* row_scale;
  const float* column_scale;
  const float* bias;
  int32_t kind;
};

// A dense matrix to write. I8: rows are multiplied by `smoothing`, rotated in blocks of `rotation`, then quantised with
// one scale a row.
struct Sink {
  void* data;
  float* scale;
  const float* smoothing;
  int32_t kind;
  int32_t rotation;
};

static inline float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

static inline uint16_t to_bf16(float x) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

// One e^x, as in simd.h but without fused operations.
static inline float exp_scalar(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 87.0f ? 87.0f : x;
  const float rounded = x * LOG2_E + ROUND, f = x * LOG2_E - (rounded - ROUND);
  float p = C5;
  p = p * f + C4;
  p = p * f + C3;
  p = p * f + C2;
  p = p * f + C1;
  p = p * f + 1.0f;
  uint32_t bits;
  memcpy(&bits, &rounded, 4);
  bits = (bits + 127u) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return p * power;
}

// A thread's buffer; it grows and is kept, since a large malloc would be given back to the system at every call.
static inline float* scratch(size_t floats) {
  static thread_local std::unique_ptr<float[]> buffer;
  static thread_local size_t size = 0;
  if (floats + 16 > size) {
    size = floats + 16;
    buffer.reset(new float[size]);
  }
  return (float*)(((uintptr_t)buffer.get() + 63) & ~(uintptr_t)63);
}

// A register of consecutive numbers.
static inline vf load_numbers(const Source& in, int64_t row, int64_t first) {
  const int64_t at = row * in.stride + first;
  vf x;
  if (in.kind == I32) {
    vi whole;
    memcpy(&whole, (const int32_t*)in.data + at, sizeof(vi));
    x = __builtin_convertvector(whole, vf);
  } else {
    x = load((const float*)in.data + at);
  }
  if (in.row_scale) x = x * in.row_scale[row];
  if (in.column_scale) x = x * load(in.column_scale + first);
  if (in.bias) x += load(in.bias + first);
  return x;
}

static inline void load_row(const Source& in, int64_t row, int64_t first, int64_t n, float* out) {
  const int64_t at = row * in.stride + first;
  const float scale = in.row_scale ? in.row_scale[row] : 1.0f;
  const float* column = in.column_scale ? in.column_scale + first : nullptr;
  if (in.kind == I32) {
    const int32_t* p = (const int32_t*)in.data + at;
    if (column)
#pragma omp simd
      for (int64_t i = 0; i < n; i++) out[i] = (float)p[i] * scale * column[i];
    else
#pragma omp simd
      for (int64_t i = 0; i < n; i++) out[i] = (float)p[i] * scale;
  } else {
    if (in.kind == F32) {
      memcpy(out, (const float*)in.data + at, n * sizeof(float));
    } else {
      const uint16_t* p = (const uint16_t*)in.data + at;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) out[i] = from_bf16(p[i]);
    }
    if (column)
#pragma omp simd
      for (int64_t i = 0; i < n; i++) out[i] = out[i] * scale * column[i];
    else if (in.row_scale)
#pragma omp simd
      for (int64_t i = 0; i < n; i++) out[i] = out[i] * scale;
  }
  if (in.bias) {
    const float* bias = in.bias + first;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i] += bias[i];
  }
}

static inline float sum_of_squares(const float* x, int64_t n) {
  float lane[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; j++) lane[j] += x[i + j] * x[i + j];
  for (int j = 0; i + j < n; j++) lane[j] += x[i + j] * x[i + j];
  for (int half = 8; half; half /= 2)
    for (int j = 0; j < half; j++) lane[j] += lane[j + half];
  return lane[0];
}

void emit_row(const Sink& out, int64_t row, float* values, int64_t n);

// Hadamard transform of consecutive blocks of 16 or more, scaled to keep lengths; its own inverse. x is multiplied by
// `by` before, where that is not null.
void rotate(float* x, int64_t n, int block, const float* by = nullptr);

// Symmetric INT8 with one scale, which is returned: 0 of zeros, NaN of a row with inf or NaN (its numbers are zeros).
float quantize(const float* x, int64_t n, int8_t* out);

}  // namespace bi
