// Keys and values that a thread multiplies next, asked for while it multiplies others: few rows wait for memory. A few
// lines at a time, since what is multiplied meanwhile has to come through the same buffers of the core.
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
  int num_places = 0, num_lines = 0;
  int place = 0, line = 0;  // that is next
  int share = 0;            // lines a time

  void add(const void* at, int64_t bytes) {
    places[num_places++] = {(const char*)at, (int32_t)(bytes / LINE)};
    num_lines += (int)(bytes / LINE);
  }

 public:
  // Positions from .. to of one split, whose blocks are in `table`.
  void find(const Cache& cache, const int32_t* table, int kv_head, int from, int to) {
    for (int t = from / TILE * TILE; t < to; t += TILE) {
      const int64_t block = table[t / cache.block_size], offset = t % cache.block_size;
      add(key_tile(cache, block, kv_head, offset), key_tile_bytes(cache));
      add(value_tile(cache, block, kv_head, offset), value_tile_bytes(cache));
      if (cache.kind != I8) continue;
      add(key_scale(cache, block, kv_head, offset), TILE * sizeof(float));
      add(value_scale(cache, block, kv_head, offset), TILE * sizeof(float));
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

  // How many times `ask` will be called.
  void divide(int times) { share = (num_lines + times - 1) / times; }

  // For a share of it.
  void ask() {
    for (int left = share; left > 0 && place < num_places;) {
      const Place& p = places[place];
      const int until = std::min(line + left, (int)p.lines);
      left -= until - line;
      for (; line < until; line++) ask_for(p.at + line * LINE);
      if (line == p.lines) line = 0, place++;
    }
  }
};

}  // namespace bi
