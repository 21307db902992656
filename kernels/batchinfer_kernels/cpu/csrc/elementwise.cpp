// RMS norm, gated activations and quantisation: one row in, one row out.
#include "activation.h"
#include "row_ops.h"

namespace bi {

// Rows below this many numbers in all are not worth waking the other threads (about 2 us).
constexpr int64_t PARALLEL_FROM = 16384;

// residual += x (kept in the residual's own precision), and x becomes what was stored
static void add_residual(float* x, void* residual, int32_t kind, int64_t n) {
  if (kind == F32) {
    float* r = (float*)residual;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] = r[i] = r[i] + x[i];
  } else {
    uint16_t* r = (uint16_t*)residual;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
      r[i] = to_bf16(from_bf16(r[i]) + x[i]);
      x[i] = from_bf16(r[i]);
    }
  }
}

void rms_norm(const Source& in, void* residual, int32_t residual_kind, const Norm& norm, Range rows, int64_t n,
              const Sink& out) {
  const int64_t residual_bytes = n * (residual_kind == F32 ? 4 : 2);
  for (int64_t m = rows.first; m < rows.last; m++) {
    float* x = scratch(n);
    load_row(in, m, 0, n, x);
    if (residual) add_residual(x, (char*)residual + m * residual_bytes, residual_kind, n);
    const float k = 1.0f / std::sqrt(sum_of_squares(x, n) / (float)n + norm.eps);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * k * (norm.weight[i] + norm.offset);
    emit_row(out, m, x, n);
  }
}

void act_and_mul(const Source& in, int32_t activation, Range rows, int64_t n, const Sink& out) {
  for (int64_t m = rows.first; m < rows.last; m++) {
    float* x = scratch(2 * n + 2 * W);
    float* up = x + (n + W - 1) / W * W;
    load_row(in, m, 0, n, x);
    load_row(in, m, n, n, up);
    for (int64_t i = 0; i < n; i += W) store(x + i, activate(activation, load(x + i)) * load(up + i));
    emit_row(out, m, x, n);
  }
}

void convert(const Source& in, Range rows, int64_t n, const Sink& out) {
  for (int64_t m = rows.first; m < rows.last; m++) {
    float* x = scratch(n);
    load_row(in, m, 0, n, x);
    emit_row(out, m, x, n);
  }
}

}  // namespace bi

using namespace bi;

BI_EXPORT void bi_rms_norm(const Source* in, void* residual, int32_t residual_kind, const Norm* norm, int64_t rows,
                            int64_t n, const Sink* out, int threads) {
#pragma omp parallel num_threads(threads) if (rows * n >= PARALLEL_FROM)
  rms_norm(*in, residual, residual_kind, *norm, Team::share(rows), n, *out);
}

BI_EXPORT void bi_act_and_mul(const Source* in, int32_t activation, int64_t rows, int64_t n, const Sink* out,
                               int threads) {
#pragma omp parallel num_threads(threads) if (rows * n >= PARALLEL_FROM / 4)
  act_and_mul(*in, activation, Team::share(rows), n, *out);
}

// Conversion of rows: int32 products to numbers, or numbers to INT8.
BI_EXPORT void bi_convert(const Source* in, int64_t rows, int64_t n, const Sink* out, int threads) {
#pragma omp parallel num_threads(threads) if (rows * n >= PARALLEL_FROM)
  convert(*in, Team::share(rows), n, *out);
}
