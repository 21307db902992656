// Where a token's key and value lie in the paged cache.
//
// A block holds block_size tokens of one layer, kv head by kv head, as tiles of 16 tokens. Inside a tile, with P = 2
// numbers of bf16 or P = 1 of float32 (a "word" is 32 bits either way):
//   keys    [head_dim / P][16 tokens][P]   a register of 16 words holds one (pair of) dimension(s) of 16 tokens
//   values  [16 tokens / P][head_dim][P]   a register of 16 words holds 16 dimensions of one (pair of) token(s)
// so neither q.k nor p.v needs a sum across a register, and bf16 words are what vdpbf16ps multiplies.
// head_dim is padded to a multiple of 16 with zeros that nobody ever writes.
//
// INT8 lies in the order of bf16, and each token of a kv head has a scale for its key and one for its value:
//   scales  [num_blocks, num_kv_heads, block_size]
// Before it is rounded, a head is rotated by a Hadamard matrix in blocks; so are queries, and what comes out is rotated
// back.
#pragma once
#include <cstdint>

#include "rows.h"

namespace bi {

constexpr int TILE = 16;

struct Cache {
  void* keys;
  void* values;
  int64_t num_blocks;
  float* key_scales;  // of I8, else null
  float* value_scales;
  int32_t kind;  // F32, BF16 or I8
  int32_t block_size;
  int32_t num_kv_heads;
  int32_t head_dim;      // of keys, unpadded
  int32_t v_head_dim;    // of values, unpadded
  int32_t key_rotation;  // of I8: block of the rotation, 0 for none
  int32_t value_rotation;
};

static inline int64_t padded(int64_t head_dim) { return (head_dim + TILE - 1) / TILE * TILE; }

// Numbers from the start of the cache to the tile of `offset` tokens into `block`, for one kv head.
static inline int64_t tile_at(const Cache& c, int64_t dim, int64_t block, int64_t head, int64_t offset) {
  return ((block * c.num_kv_heads + head) * c.block_size + offset / TILE * TILE) * dim;
}

static inline int64_t scale_at(const Cache& c, int64_t block, int64_t head, int64_t offset) {
  return (block * c.num_kv_heads + head) * c.block_size + offset;
}

}  // namespace bi
