// Products of rows with weights that lie packed, as this machine multiplies them fastest.
//
// A row's result does not depend on the rows beside it, on their number or on the threads: int8 sums are exact, and a
// bf16 sum adds its pairs in ascending order of the summed index in whichever kernel.
#pragma once
#include <cstdint>

#include "rows.h"

namespace bi {

// Weights [k, n] as tiles of 1 KB, each of them TILE_N columns times KEPT_BYTES of the summed index:
//   [padded n / 16][k / K][K / P][16 columns][P]   with P = 4, K = 64 of int8 and P = 2, K = 32 of bf16
// so that a 32-bit word holds the P numbers of a column that are summed first, and a register 16 columns. n is padded
// to a multiple of 32 with zeros; k is a multiple of K. Mirrored in packed.py and library.py.
struct Packed {
  const void* data;
  int64_t n, k;
  int32_t kind;  // I8 or BF16
};

constexpr int TILE_N = 16, PAIR_N = 2 * TILE_N;
constexpr int64_t KEPT_BYTES = 64, TILE_BYTES = 1024;

static inline int64_t row_bytes(const Packed& w) { return w.k * (w.kind == I8 ? 1 : 2); }
static inline int64_t padded_columns(const Packed& w) { return (w.n + PAIR_N - 1) / PAIR_N * PAIR_N; }

// out[row * padded n + column], int32 of int8 and float32 of bf16; rows of k numbers follow each other. Called by all
// threads of a team, which share the work, and returns when it is done; or by one that does it `alone`.
void multiply(const void* rows, int64_t num_rows, const Packed& weights, void* out, bool alone);

struct Scales {  // of a product's numbers, and what is added to them; as a Source's
  const float* row;
  const float* column;
  const float* bias;
};

// The first half of the columns, put through the activation, times the second half: out[row * n / 2 + column], float32.
// n / 2 is a multiple of 16.
void multiply_gated(const void* rows, int64_t num_rows, const Packed& weights, const Scales& scales, int32_t activation,
                    float* out, bool alone);

struct Largest {  // of a row's numbers, the first of equal ones; -1 if none is above -inf
  float value = -INFINITY;
  bool has_nan = false;
  int64_t column = -1;
};

// Takes the numbers times `factor`, whose columns begin with `first_column`, into what the calling thread has seen of
// each row. By all threads of a team, each of which does a part.
void multiply_largest(const void* rows, int64_t num_rows, const Packed& weights, const Scales& scales, float factor,
                      int64_t first_column, Largest* mine);

}  // namespace bi
