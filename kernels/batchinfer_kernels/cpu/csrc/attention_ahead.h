// INT8 keys and values that a thread multiplies next, asked for while it widens others: few rows wait for memory. (bf16 is
// not widened, and gained nothing.)
#pragma once
#include <algorithm>

#include "attention_plan.h"
#include "layout.h"

namespace bi {

class Ahead {
  static constexpr int LINE = 64, FEW_TOKENS = 4;
  struct Place {
    const char* at;
    int32_t lines;
  };
  Place places[4 * SPLIT / TILE];
  int num_places = 0, asked = 0;

  void add(const void* at, int64_t bytes) { places[num_places++] = {(const char*)at, (int32_t)(bytes / LINE)}; }

 public:
  // Positions from .. to of one split, whose blocks are in `table`.
  void find(const Cache& cache, const int32_t* table, int kv_head, int from, int to) {
    const int64_t dim = padded(cache.head_dim), v_dim = padded(cache.v_head_dim);
    for (int t = from / TILE * TILE; t < to; t += TILE) {
      const int64_t block = table[t / cache.block_size], offset = t % cache.block_size;
      const int64_t scale = scale_at(cache, block, kv_head, offset);
      add(cache.key_scales + scale, TILE * sizeof(float));
      add(cache.value_scales + scale, TILE * sizeof(float));
      add((const int8_t*)cache.keys + tile_at(cache, dim, block, kv_head, offset), TILE * dim);
      add((const int8_t*)cache.values + tile_at(cache, v_dim, block, kv_head, offset), TILE * v_dim);
    }
  }

  // The first split of an item, if few rows are in it.
  void find(const Plan& plan, const Cache& cache, int window, const Item& item, int kv_head) {
    const Segment& segment = plan.segments[item.segment_begin];
    if (segment.count > FEW_TOKENS || item.segment_end - item.segment_begin > FEW_TOKENS) return;
    const int low = window > 0 ? std::max(0, segment.position + 1 - window) : 0;
    const int split = std::max(item.split_begin, low / SPLIT);
    if (split < item.split_end)
      find(cache, plan.tables + item.table * plan.table_stride, kv_head, std::max(low, split * SPLIT),
           std::min(segment.position + segment.count, (split + 1) * SPLIT));
  }

  // So much of it should be on its way.
  void ask(int done, int of) {
    for (const int until = num_places * done / of; asked < until; asked++)
      for (int line = 0; line < places[asked].lines; line++) ask_for(places[asked].at + line * LINE);
  }
};

}  // namespace bi
