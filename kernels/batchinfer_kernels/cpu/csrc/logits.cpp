// Running reductions over slices of logits: argmax, top-k and log-sum-exp, without a float copy of [rows, vocab]; only
// rows that are asked for are kept whole.

#include <algorithm>

#include "row_ops.h"

namespace bi {

constexpr int64_t CHUNK = 1024;

// Cap in place: cap * tanh(x / cap). n is a multiple of W.
static void softcap(float* x, int64_t n, float cap) {
  for (int64_t i = 0; i < n; i += W) {
    const vf u = load(x + i) / cap, e = exp(as_float((vu)u | 0x80000000u) * 2.0f);
    store(x + i, as_float((vu)(cap * (1.0f - e) / (1.0f + e)) | ((vu)u & 0x80000000u)));
  }
}

// A forbidden word (-inf) adds e^-87, which is nothing beside the peak's 1. n is a multiple of W.
static void add_to_total(const float* x, int64_t n, float chunk_peak, float* peak, float* total) {
  if (chunk_peak > *peak) {
    *total *= *peak == -INFINITY ? 0.0f : exp_scalar(*peak - chunk_peak);
    *peak = chunk_peak;
  }
  vf sum = splat(0.0f);
  if (*peak == -INFINITY)  // nothing yet, unless a NaN
    for (int64_t i = 0; i < n; i += W) sum += load(x + i) == splat(-INFINITY) ? splat(0.0f) : load(x + i);
  else
    for (int64_t i = 0; i < n; i += W) sum += exp(load(x + i) - *peak);
  *total += sum_lanes(sum);
}

static bool any_nan(const float* x, int64_t n) {
  uint32_t worst = 0;
#pragma omp simd reduction(max : worst)
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    worst = worst > bits ? worst : bits;
  }
  return worst > 0x7f800000u;
}

// Columns come in ascending order, so a tie keeps the lower index by being refused here.
static void insert(float value, int64_t index, float* values, int64_t* indices, int k) {
  int at = k - 1;
  for (; at > 0 && values[at - 1] < value; at--) {
    values[at] = values[at - 1];
    indices[at] = indices[at - 1];
  }
  values[at] = value;
  indices[at] = index;
}

static void keep_top(const float* x, int64_t n, int64_t first, float* values, int64_t* indices, int k) {
  for (int64_t i = 0; i < n; i += 64) {
    const int64_t end = i + 64 < n ? i + 64 : n;
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int64_t j = i; j < end; j++) most = most > x[j] ? most : x[j];
    if (!(most > values[k - 1])) continue;
    for (int64_t j = i; j < end; j++)
      if (x[j] > values[k - 1]) insert(x[j], first + j, values, indices, k);
  }
}

void reduce_logits(const Source& logits, Range rows, int64_t columns, int64_t first_column, float scale, float cap,
                   const Reduction& out) {
  for (int64_t m = rows.first; m < rows.last; m++)
    for (int64_t c = 0; c < columns; c += CHUNK) {
      const int64_t n = columns - c < CHUNK ? columns - c : CHUNK;
      float x[CHUNK], most = -INFINITY;
      load_row(logits, m, c, n, x);
      if (scale != 1.0f)
        for (int64_t i = 0; i < n; i++) x[i] *= scale;
      const int64_t whole = (n + W - 1) / W * W;
      std::fill(x + n, x + whole, 0.0f);
      if (cap > 0.0f) softcap(x, whole, cap);
      if (out.place && out.place[m] >= 0)
        memcpy(out.logits + out.place[m] * out.num_columns + first_column + c, x, n * sizeof(float));
      out.has_nan[m] |= any_nan(x, n);
      std::fill(x + n, x + whole, -INFINITY);
#pragma omp simd reduction(max : most)
      for (int64_t i = 0; i < n; i++) most = most > x[i] ? most : x[i];
      if (most > out.best[m]) {
        int64_t at = 0;
        while (x[at] != most) at++;
        out.best[m] = most;
        out.best_index[m] = first_column + c + at;
      }
      if (out.peak) add_to_total(x, whole, most, out.peak + m, out.total + m);
      if (out.top_values && most > out.top_values[m * out.k + out.k - 1])
        keep_top(x, n, first_column + c, out.top_values + m * out.k, out.top_indices + m * out.k, out.k);
    }
}

}  // namespace bi

using namespace bi;

BI_EXPORT void bi_reduce_logits(const Source* logits, int64_t rows, int64_t columns, int64_t first_column, float scale,
                                 float cap, const Reduction* reduction, int threads) {
#pragma omp parallel num_threads(threads) if (rows * columns >= 16384)
  reduce_logits(*logits, Team::share(rows), columns, first_column, scale, cap, *reduction);
}
