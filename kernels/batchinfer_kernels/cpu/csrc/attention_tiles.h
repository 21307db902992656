// The two products of attention in AMX tiles, for caches of bf16 pairs: 16 query rows, 16 or 32 tokens or dimensions at a
// time.
//
// A row's sums run over the same numbers in the same order whichever rows share its tile; tokens that a row may not see
// have a weight of zero, which adds nothing. Rows past the last one hold whatever was there, and nobody reads them.
#pragma once
#include "layout.h"
#include "tiles.h"

namespace bi {

#if BI_TILES
constexpr int GROUP = 16, MAX_GROUPS = 3;  // query rows of a tile, and tiles of rows that share keys and values

// Tiles 0-2 hold sums, 3 and 7 rows of 32 numbers, 4 rows of 16; 5 is 32 of the summed index of the cache, 6 half of it.
// One for each number of rows up to a group, since tiles of fewer rows take less time, and one for more.
struct AttentionPalettes {
  Palette of[GROUP + 1];
  constexpr AttentionPalettes() : of() {
    for (int count = 1; count <= GROUP; count++)
      for (int t = 0; t < 8; t++) {
        of[count].bytes[t] = t == 4 ? 32 : 64;
        of[count].rows[t] = (uint8_t)(t == 6 ? 8 : t == 5 ? 16 : count);
      }
  }
};
static constexpr AttentionPalettes ATTENTION_PALETTES;

static inline void use_attention_tiles(int count) { _tile_loadconfig(&ATTENTION_PALETTES.of[count < GROUP ? count : GROUP]); }

// Which groups of rows take part.
struct Groups {
  bool has[MAX_GROUPS];
};

static inline void zero_sums(const Groups& groups) {
  if (groups.has[0]) _tile_zero(0);
  if (groups.has[1]) _tile_zero(1);
  if (groups.has[2]) _tile_zero(2);
}

static inline void store_sums(const Groups& groups, float* to, int64_t stride) {  // `stride` numbers from row to row
  if (groups.has[0]) _tile_stored(0, to, stride * 4);
  if (groups.has[1]) _tile_stored(1, to + GROUP * stride, stride * 4);
  if (groups.has[2]) _tile_stored(2, to + 2 * GROUP * stride, stride * 4);
}

// scores[row][0..16] = queries times the keys of 16 tokens.
static inline void score_tile(const Groups& groups, const uint16_t* q, int64_t dim, const uint32_t* keys, float* scores,
                              int64_t stride) {
  const int64_t bytes = dim * 2, group = GROUP * dim;
  zero_sums(groups);
  int64_t d = 0;
  for (; d + 32 <= dim; d += 32) {
    _tile_loadd(5, keys + d / 2 * TILE, 64);
    if (groups.has[0]) {
      _tile_loadd(3, q + d, bytes);
      _tile_dpbf16ps(0, 3, 5);
    }
    if (groups.has[1]) {
      _tile_loadd(7, q + group + d, bytes);
      _tile_dpbf16ps(1, 7, 5);
    }
    if (groups.has[2]) {
      _tile_loadd(3, q + 2 * group + d, bytes);
      _tile_dpbf16ps(2, 3, 5);
    }
  }
  if (d < dim) {
    _tile_loadd(6, keys + d / 2 * TILE, 64);
    if (groups.has[0]) {
      _tile_loadd(4, q + d, bytes);
      _tile_dpbf16ps(0, 4, 6);
    }
    if (groups.has[1]) {
      _tile_loadd(4, q + group + d, bytes);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (groups.has[2]) {
      _tile_loadd(4, q + 2 * group + d, bytes);
      _tile_dpbf16ps(2, 4, 6);
    }
  }
  store_sums(groups, scores, stride);
}

// The sums of 16 dimensions, plus weights of 16 tokens times their values. Rows of values are `dim` words apart.
static inline void weigh_tile(const Groups& groups, const uint16_t* weights, int64_t stride, const uint32_t* values,
                              int64_t dim) {
  const int64_t group = GROUP * stride;
  _tile_loadd(6, values, dim * 4);
  if (groups.has[0]) {
    _tile_loadd(4, weights, stride * 2);
    _tile_dpbf16ps(0, 4, 6);
  }
  if (groups.has[1]) {
    _tile_loadd(4, weights + group, stride * 2);
    _tile_dpbf16ps(1, 4, 6);
  }
  if (groups.has[2]) {
    _tile_loadd(4, weights + 2 * group, stride * 2);
    _tile_dpbf16ps(2, 4, 6);
  }
}

// Likewise with the weights of 32 tokens, whose values lie in one piece. (A tile's number is part of an instruction's text,
// so it cannot be a parameter.)
static inline void weigh_two_tiles(const Groups& groups, const uint16_t* weights, int64_t stride, const uint32_t* values,
                                   int64_t dim) {
  const int64_t group = GROUP * stride;
  _tile_loadd(5, values, dim * 4);
  if (groups.has[0]) {
    _tile_loadd(3, weights, stride * 2);
    _tile_dpbf16ps(0, 3, 5);
  }
  if (groups.has[1]) {
    _tile_loadd(7, weights + group, stride * 2);
    _tile_dpbf16ps(1, 7, 5);
  }
  if (groups.has[2]) {
    _tile_loadd(3, weights + 2 * group, stride * 2);
    _tile_dpbf16ps(2, 3, 5);
  }
}
#endif

}  // namespace bi
