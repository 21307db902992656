// Row-wise ops: each call does a range of rows. A row's result does not depend on the others.
#pragma once
#include <atomic>

#include "layout.h"
#include "team.h"

namespace bi {

struct Norm {  // RMS norm with weight + offset; mirrored in library.py
  const float* weight;
  float offset;
  float eps;
};

struct Rope {  // mirrored in library.py
  const float* cos;  // [num_positions, rotary_dim / 2]
  const float* sin;
  const float* q_norm;  // [head_dim], null without
  const float* k_norm;
  float norm_offset;
  float norm_eps;
  int32_t rotary_dim;
  int32_t interleaved;  // pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
};

struct Reduction {  // mirrored in library.py; all arrays have a row each
  float* best;      // largest value so far, starts at -inf
  int64_t* best_index;
  float* peak;  // log-sum-exp = peak + log(total); null if not wanted. Starts at -inf and 0
  float* total;
  float* top_values;  // [rows, k], descending; null if not wanted. Starts at -inf
  int64_t* top_indices;
  bool* has_nan;         // starts false
  const int64_t* place;  // the row of `logits` in which a row is kept whole, -1 for none; null if no row is
  float* logits;         // [kept rows, num_columns]
  int64_t num_columns;
  int32_t k;
};

// residual += in (where there is a residual, kept in its own precision), and out is the norm of it.
void rms_norm(const Source& in, void* residual, int32_t residual_kind, const Norm& norm, Range rows, int64_t n,
              const Sink& out);

// in: [rows, 2 n], the gate and then the up projection; activation 0 is silu, 1 gelu (tanh)
void act_and_mul(const Source& in, int32_t activation, Range rows, int64_t n, const Sink& out);

void convert(const Source& in, Range rows, int64_t n, const Sink& out);

// query may have no heads, and rope no dimensions: then this only writes keys and values. A token's slot is
// block * block_size + offset; -1 writes nothing. Counts the slots or positions outside of their tables.
struct RopeCall {
  const Source *query, *key, *value;
  const Rope* rope;
  const int64_t* positions;
  int64_t num_positions;
  const int64_t* slots;
  Range tokens;
  int32_t num_q_heads;
};
void rope_and_kv_write(const RopeCall& call, const Cache& cache, const Sink& query_out, std::atomic<int64_t>& outside);

// logits[row, column] * scale, capped where cap > 0, is word first_column + column of the row.
void reduce_logits(const Source& logits, Range rows, int64_t columns, int64_t first_column, float scale, float cap,
                   const Reduction& out);

}  // namespace bi
