// Rotary embedding of queries and keys, optional per-head RMS norm, and the write of keys and values into the cache.
#include <algorithm>

#include "row_ops.h"

namespace bi {

static void norm_head(float* x, int n, const float* weight, float offset, float eps) {
  const float k = 1.0f / std::sqrt(sum_of_squares(x, n) / (float)n + eps);
#pragma omp simd
  for (int i = 0; i < n; i++) x[i] = x[i] * k * (weight[i] + offset);
}

static void rotate_head(float* x, const Rope& rope, const float* cos, const float* sin) {
  const int half = rope.rotary_dim / 2;
  if (rope.interleaved) {
    for (int i = 0; i < half; i++) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  float* y = x + half;
#pragma omp simd
  for (int i = 0; i < half; i++) {
    const float a = x[i], b = y[i];
    x[i] = a * cos[i] - b * sin[i];
    y[i] = b * cos[i] + a * sin[i];
  }
}

// A head as INT8 in q (n numbers); the scale goes to `scale`. x is changed.
static void quantize_head(float* x, int n, int rotation, int8_t* q, float* scale) {
  if (rotation) rotate(x, n, rotation);
  *scale = quantize(x, n, q);
}

// `q` has room for a head.
static void write_int8(const Cache& c, float* key, float* value, int8_t* q, int64_t block, int head, int64_t offset) {
  const int64_t dim = padded(c.v_head_dim), token = offset % TILE;
  quantize_head(key, c.head_dim, c.key_rotation, q, key_scale(c, block, head, offset));
  int8_t* page = (int8_t*)key_tile(c, block, head, offset);
  for (int d = 0; d < c.head_dim; d++) page[(d / 2) * 2 * TILE + token * 2 + d % 2] = q[d];
  quantize_head(value, c.v_head_dim, c.value_rotation, q, value_scale(c, block, head, offset));
  page = (int8_t*)value_tile(c, block, head, offset) + token / 2 * 2 * dim + token % 2;
  for (int d = 0; d < c.v_head_dim; d++) page[2 * d] = q[d];
}

#if defined(__AVX512BW__)
// 16 numbers as bf16, each in both halves of its word.
static inline __m512i both_halves(vf x) {
  const vu bits = (vu)x, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vu nan = (bits >> 16) | 0x40u, half = (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
  return (__m512i)(half | half << 16);
}
#endif

static void write_key(const Cache& c, const float* x, char* tile, int token) {
  if (c.kind == F32) {
    float* page = (float*)tile;
    for (int d = 0; d < c.head_dim; d++) page[d * TILE + token] = x[d];
  } else {
    uint16_t* page = (uint16_t*)tile + token * 2;
    int d = 0;
    for (; d + 2 <= c.head_dim; d += 2) {
      const uint32_t pair = to_bf16(x[d]) | (uint32_t)to_bf16(x[d + 1]) << 16;
      memcpy(page + d * TILE, &pair, 4);
    }
    if (d < c.head_dim) page[d * TILE] = to_bf16(x[d]);
  }
}

static void write_value(const Cache& c, const float* x, char* tile, int token) {
  const int64_t dim = padded(c.v_head_dim);
  if (c.kind == F32) {
    memcpy((float*)tile + token * dim, x, c.v_head_dim * sizeof(float));
  } else {
    uint16_t* page = (uint16_t*)tile + token / 2 * 2 * dim;
    int d = 0;
#if defined(__AVX512BW__)
    const __mmask32 mine = token % 2 ? 0xaaaaaaaau : 0x55555555u;  // the other token may be another thread's
    for (; d + W <= c.v_head_dim; d += W)
      _mm512_mask_storeu_epi16(page + 2 * d, mine, both_halves(load(x + d)));
#endif
    for (; d < c.v_head_dim; d++) page[2 * d + token % 2] = to_bf16(x[d]);
  }
}

void rope_and_kv_write(const RopeCall& call, const Cache& c, const Sink& query_out, std::atomic<int64_t>& outside) {
  const Rope& rope = *call.rope;
  const int dim = c.head_dim, half = rope.rotary_dim / 2, kv_heads = c.num_kv_heads;
  const int64_t q_width = (int64_t)call.num_q_heads * dim, k_width = (int64_t)kv_heads * dim;
  const int64_t v_width = (int64_t)kv_heads * c.v_head_dim, kv_width = k_width + v_width;
  for (int64_t t = call.tokens.first; t < call.tokens.last; t++) {
    const int64_t position = half ? call.positions[t] : 0, slot = call.slots[t];
    if ((half && (position < 0 || position >= call.num_positions)) || slot < -1 || slot >= c.num_blocks * c.block_size) {
      outside++;
      continue;
    }
    const float *cos = half ? rope.cos + position * half : nullptr, *sin = half ? rope.sin + position * half : nullptr;
    float* x = scratch(q_width + kv_width + std::max(dim, c.v_head_dim));
    if (call.num_q_heads) {
      load_row(*call.query, t, 0, q_width, x);
      for (int h = 0; h < call.num_q_heads; h++) {
        if (rope.q_norm) norm_head(x + h * dim, dim, rope.q_norm, rope.norm_offset, rope.norm_eps);
        rotate_head(x + h * dim, rope, cos, sin);
      }
      emit_row(query_out, t, x, q_width);
    }
    if (slot < 0) continue;
    load_row(*call.key, t, 0, k_width, x);
    load_row(*call.value, t, 0, v_width, x + k_width);
    const int64_t block = slot / c.block_size, offset = slot % c.block_size;
    for (int h = 0; h < kv_heads; h++) {
      if (rope.k_norm) norm_head(x + h * dim, dim, rope.k_norm, rope.norm_offset, rope.norm_eps);
      rotate_head(x + h * dim, rope, cos, sin);
      if (c.kind == I8) {
        write_int8(c, x + h * dim, x + k_width + h * c.v_head_dim, (int8_t*)(x + kv_width), block, h, offset);
        continue;
      }
      write_key(c, x + h * dim, key_tile(c, block, h, offset), offset % TILE);
      write_value(c, x + k_width + h * c.v_head_dim, value_tile(c, block, h, offset), offset % TILE);
    }
  }
}

}  // namespace bi

using namespace bi;

BI_EXPORT int64_t bi_rope_and_kv_write(const Source* query, const Source* key, const Source* value, const Rope* rope,
                                        const int64_t* positions, int64_t num_positions, const int64_t* slots,
                                        const Cache* cache, int64_t tokens, int32_t num_q_heads, const Sink* query_out,
                                        int threads) {
  const int64_t width = (int64_t)(num_q_heads + cache->num_kv_heads) * cache->head_dim;
  std::atomic<int64_t> outside{0};
#pragma omp parallel num_threads(threads) if (tokens * width >= 8192)
  rope_and_kv_write({query, key, value, rope, positions, num_positions, slots, Team::share(tokens), num_q_heads}, *cache,
                    *query_out, outside);
  return outside;
}
