// The work of one step's attention, found once and used by every layer.
//
// The context of a row is cut into splits of SPLIT tokens counted from position 0. A row's result is its splits merged
// in ascending order: what a split gives depends on the row alone, so it does not matter who computes it, beside whom,
// or in which step. That is what makes the three kinds of work below interchangeable to the bit.
#pragma once
#include <cstdint>
#include <vector>

#include "simd.h"

namespace bi {

#ifndef BI_SPLIT  // benchmarks/determinism.py asks what another would cost
#define BI_SPLIT 256
#endif
constexpr int SPLIT = BI_SPLIT;
constexpr int MAX_ROWS = 48;  // rows (tokens x query heads of a kv head) that share a pass over keys and values

struct Segment {  // query tokens token .. token + count at positions position ..
  int64_t token;
  int32_t count;
  int32_t position;
};

// A run of segments over splits split_begin .. split_end of the blocks in row `table`.
struct Item {
  int32_t segment_begin, segment_end;
  int32_t table;
  int32_t split_begin, split_end;
  int32_t queue;  // of the thread that does it if it has the time, -1: whichever
  double cost;
};

// Items in an order in which threads take them: each has a queue of its own, and when that is done looks into the others.
struct Work {
  std::vector<Item> items;      // queue after queue, the heaviest of each first
  std::vector<int32_t> starts;  // [queues + 1]
  bool is_fine = false;         // the heaviest item is an eighth of what each thread has to do at most
};

struct Plan {
  const int32_t* tables;  // [num_sequences, table_stride], borrowed
  int64_t table_stride;
  int64_t num_tokens;
  int64_t num_partials;
  int32_t block_size;
  std::vector<Segment> segments;
  Work partial;  // first: splits of a shared prefix or of one long row, kept apart in the workspace
  Work last;     // then: what is left of each row, merged after its partials, written to the output
  std::vector<int64_t> partial_of;  // [num_tokens]: the workspace's entry for the token's split 0, or -1
};

}  // namespace bi
