// Where a token's key and value lie in the paged cache.
//
// A block holds block_size tokens of all layers, one after the other, so that memory is used by whole blocks. A layer's
// part is the keys of all kv heads, then their values, each kv head as tiles of 16 tokens. (A head's values right behind its
// keys cost CPUs without tiles 12 %.) Inside a tile, with P = 2 numbers of bf16 or P = 1 of float32 (a "word" is 32 bits
// either way):
//   keys    [head_dim / P][16 tokens][P]   a register of 16 words holds one (pair of) dimension(s) of 16 tokens
//   values  [16 tokens / P][head_dim][P]   a register of 16 words holds 16 dimensions of one (pair of) token(s)
// so neither q.k nor p.v needs a sum across a register, and bf16 words are what vdpbf16ps multiplies.
// head_dim is padded to a multiple of 16 with zeros that nobody ever writes.
//
// INT8 lies in the order of bf16, and each token of a kv head has a scale for its key and one for its value, behind both:
//   scales  [num_kv_heads, block_size] of keys, then of values
// Before it is rounded, a head is rotated by a Hadamard matrix in blocks; so are queries, and what comes out is rotated
// back.
#pragma once
#include <cstdint>

#include "rows.h"

namespace bi {

constexpr int TILE = 16;

struct Cache {  // of one layer; mirrored in library.py
  char* keys;  // of the first head of block 0; the other three likewise
  char* values;
  char* key_scales;  // of I8, else null
  char* value_scales;
  int64_t block_stride;  // bytes from block to block, of all four
  int64_t num_blocks;
  int32_t kind;  // F32, BF16 or I8
  int32_t block_size;
  int32_t num_kv_heads;
  int32_t head_dim;      // of keys, unpadded
  int32_t v_head_dim;    // of values, unpadded
  int32_t key_rotation;  // of I8: block of the rotation, 0 for none
  int32_t value_rotation;
};

static inline int64_t padded(int64_t head_dim) { return (head_dim + TILE - 1) / TILE * TILE; }

static inline int64_t number_size(const Cache& c) { return c.kind == F32 ? 4 : c.kind == BF16 ? 2 : 1; }

static inline int64_t block_tiles(const Cache& c) { return c.block_size / TILE; }

static inline int64_t key_tile_bytes(const Cache& c) { return TILE * padded(c.head_dim) * number_size(c); }
static inline int64_t value_tile_bytes(const Cache& c) { return TILE * padded(c.v_head_dim) * number_size(c); }

// The tile of `offset` tokens into `block`, of one kv head.
static inline char* key_tile(const Cache& c, int64_t block, int64_t head, int64_t offset) {
  return c.keys + block * c.block_stride + (head * block_tiles(c) + offset / TILE) * key_tile_bytes(c);
}

static inline char* value_tile(const Cache& c, int64_t block, int64_t head, int64_t offset) {
  return c.values + block * c.block_stride + (head * block_tiles(c) + offset / TILE) * value_tile_bytes(c);
}

// The scale of a token's key.
static inline float* key_scale(const Cache& c, int64_t block, int64_t head, int64_t offset) {
  return (float*)(c.key_scales + block * c.block_stride) + head * c.block_size + offset;
}

static inline float* value_scale(const Cache& c, int64_t block, int64_t head, int64_t offset) {
  return (float*)(c.value_scales + block * c.block_stride) + head * c.block_size + offset;
}

}  // namespace bi
