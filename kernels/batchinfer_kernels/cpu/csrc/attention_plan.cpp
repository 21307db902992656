// Cutting a step's attention into items of work.
#include "attention_plan.h"

#include <algorithm>
#include <numeric>

#include "team.h"

namespace bi {

struct Batch {  // mirrored in library.py
  const int32_t* query_start;   // [num_sequences + 1]
  const int32_t* context_lens;  // [num_sequences], the new tokens included
  const int32_t* tables;        // [num_sequences, table_stride]
  int64_t table_stride;
  int64_t num_blocks;
  int64_t max_partials;  // entries the workspace may have
  int32_t num_sequences;
  int32_t block_size;
  int32_t queries_per_kv_head;
  int32_t num_kv_heads;
  int32_t num_threads;
  int32_t num_least_shared;
  const int32_t* least_shared;  // [num_least_shared]: tokens that must share i + 1 splits to read them together
};

enum Fault : int32_t { OK = 0, BAD_QUERY_START = 1, BAD_CONTEXT = 2, TABLE_TOO_SHORT = 3, BLOCK_OUTSIDE = 4 };

struct Planner {
  const Batch& b;
  Plan& plan;
  std::vector<int32_t> order;    // sequences that may share, so sorted that equal prefixes are neighbours
  std::vector<int32_t> common;   // [order]: splits that order[k] shares with order[k - 1]
  std::vector<int32_t> grouped;  // [num_sequences]: leading splits that a shared item computes
  std::vector<int32_t> queue_of;  // [num_sequences]: the queue of its shared splits, or -1
  const int queues;               // of which each thread has one

  int count(int i) const { return b.query_start[i + 1] - b.query_start[i]; }
  int position(int i) const { return b.context_lens[i] - count(i); }
  const int32_t* table(int i) const { return b.tables + i * b.table_stride; }
  int64_t blocks(int64_t tokens) const { return (tokens + b.block_size - 1) / b.block_size; }
  int shareable(int i) const { return (position(i) + 1) / SPLIT; }  // splits that all of its queries see whole

  Fault check(int i) const {
    if (count(i) < 0 || b.query_start[i] < 0) return BAD_QUERY_START;
    if (count(i) == 0) return OK;
    if (position(i) < 0) return BAD_CONTEXT;
    if (blocks(b.context_lens[i]) > b.table_stride) return TABLE_TOO_SHORT;
    for (int64_t j = 0; j < blocks(b.context_lens[i]); j++)
      if (table(i)[j] < 0 || table(i)[j] >= b.num_blocks) return BLOCK_OUTSIDE;
    return OK;
  }

  double cost(int64_t tokens, int64_t context) const {  // reading a key and value costs about four rows' arithmetic
    return (double)context * (4.0 + (double)tokens * b.queries_per_kv_head);
  }

  bool pays(int splits, int64_t tokens) const {
    return b.num_least_shared == 0 || tokens >= b.least_shared[std::min(splits, b.num_least_shared) - 1];
  }

  // Workspace for the first `splits` splits of tokens first .. first + tokens.
  bool reserve(int64_t first, int64_t tokens, int splits) {
    if (plan.num_partials + tokens * splits > b.max_partials) return false;
    for (int64_t t = first; t < first + tokens; t++, plan.num_partials += splits)
      plan.partial_of[t] = plan.num_partials;
    return true;
  }

  void find_prefixes() {
    for (int i = 0; i < b.num_sequences; i++)  // a long run of queries fills its own tiles and gains nothing
      if (count(i) && shareable(i) && (int64_t)count(i) * b.queries_per_kv_head < MAX_ROWS) order.push_back(i);
    auto end_of = [this](int i) { return table(i) + blocks((int64_t)shareable(i) * SPLIT); };
    std::sort(order.begin(), order.end(), [&](int i, int j) {
      return std::lexicographical_compare(table(i), end_of(i), table(j), end_of(j));
    });
    common.assign(order.size(), 0);
    for (size_t k = 1; k < order.size(); k++) {
      const int32_t *one = table(order[k - 1]), *two = table(order[k]);
      const int64_t equal = std::mismatch(one, end_of(order[k - 1]), two, end_of(order[k])).first - one;
      common[k] = std::min({(int)(equal * b.block_size / SPLIT), shareable(order[k - 1]), shareable(order[k])});
    }
    for (size_t k = 0; k < order.size(); k++) {
      const int deepest = std::max(common[k], k + 1 < order.size() ? common[k + 1] : 0);
      if (deepest && !reserve(b.query_start[order[k]], count(order[k]), deepest)) {  // no room: it reads alone
        common[k] = 0;
        if (k + 1 < order.size()) common[k + 1] = 0;
      }
    }
  }

  // order[first .. last] share their splits below `from`: what more they share becomes an item, then the runs inside
  // that share still more are looked at.
  void group(size_t first, size_t last, int from) {
    if (last - first < 2) return;
    const int until = *std::min_element(common.begin() + first + 1, common.begin() + last);
    int64_t tokens = 0;
    for (size_t k = first; k < last; k++) tokens += count(order[k]);
    const bool is_shared = until > from && pays(until - from, tokens);
    if (is_shared) {
      const int begin = (int)plan.segments.size();
      for (size_t k = first; k < last; k++) {
        const int i = order[k];
        plan.segments.push_back({b.query_start[i], count(i), position(i)});
        grouped[i] = until;
      }
      plan.partial.items.push_back({begin, (int)plan.segments.size(), order[first], from, until, -1,
                                    cost(tokens, (int64_t)(until - from) * SPLIT)});
    }
    size_t start = first;
    for (size_t k = first + 1; k <= last; k++)
      if (k == last || common[k] <= until) {
        group(start, k, is_shared ? until : from);
        start = k;
      }
  }

  // Rows whose prefixes did not pay have no states in the workspace.
  void forget_unshared() {
    for (const int i : order)
      if (!grouped[i]) std::fill_n(plan.partial_of.begin() + b.query_start[i], count(i), -1);
  }

  // What each sequence does alone, in tiles of rows.
  void add_own_work() {
    const int tile = std::max(1, MAX_ROWS / b.queries_per_kv_head);
    for (int i = 0; i < b.num_sequences; i++)
      for (int t = 0; t < count(i); t += tile) {
        const int tokens = std::min(tile, count(i) - t), first = position(i) + t, end = first + tokens;
        const int begin = (int)plan.segments.size();
        plan.segments.push_back({b.query_start[i] + t, tokens, first});
        plan.last.items.push_back({begin, begin + 1, i, grouped[i], (end - 1) / SPLIT + 1, queue_of[i],
                                   cost(tokens, end - (int64_t)grouped[i] * SPLIT)});
      }
  }

  // An item that would keep one thread busy while others wait is cut into runs of splits.
  void balance() {
    double total = 0.0;
    for (const Item& item : plan.partial.items) total += item.cost;
    for (const Item& item : plan.last.items) total += item.cost;
    const double share = total * b.num_kv_heads / b.num_threads;
    const std::vector<Item> shared = std::move(plan.partial.items);
    plan.partial.items.clear();
    for (const Item& item : shared)
      if (queue_of_segment(item.segment_begin) < 0) add_pieces(item, share / 4);
      else add_parts(item);
    for (Item& item : plan.last.items) {
      if (item.cost <= share / 2 || item.split_begin || item.split_end < 2) continue;
      const Segment& segment = plan.segments[item.segment_begin];
      if (plan.partial_of[segment.token] >= 0 || !reserve(segment.token, segment.count, item.split_end)) continue;
      add_pieces(item, share / 4);
      item.split_begin = item.split_end;  // nothing left but to merge
    }
  }

  void add_pieces(const Item& item, double most) {
    const double one = item.cost / (item.split_end - item.split_begin);
    const int step = std::max(1, (int)(most / one));
    for (int s = item.split_begin; s < item.split_end; s += step) {
      Item piece = item;
      piece.split_begin = s;
      piece.split_end = std::min(item.split_end, s + step);
      piece.cost = one * (piece.split_end - s);
      plan.partial.items.push_back(piece);
    }
  }

  // What is shared by enough rows is cut by rows: what a thread keeps of their splits, it finds in its own cache when it
  // goes on with the same rows.
  void find_queues() {
    int64_t tokens = 0, before = 0;
    for (const int i : order) tokens += grouped[i] ? count(i) : 0;
    if (tokens * b.queries_per_kv_head < (int64_t)MAX_ROWS * queues) return;
    for (const int i : order) {
      if (!grouped[i]) continue;
      queue_of[i] = (int32_t)(before * queues / tokens);
      before += count(i);
    }
  }

  int queue_of_segment(int segment) const {
    const int64_t token = plan.segments[segment].token;
    return queue_of[std::upper_bound(b.query_start, b.query_start + b.num_sequences, token) - b.query_start - 1];
  }

  // A shared item's rows, queue by queue.
  void add_parts(const Item& item) {
    int64_t tokens = 0, all = 0;
    for (int s = item.segment_begin; s < item.segment_end; s++) all += plan.segments[s].count;
    for (int s = item.segment_begin, first = s; s < item.segment_end; s++) {
      tokens += plan.segments[s].count;
      const int queue = queue_of_segment(s);
      if (s + 1 < item.segment_end && queue_of_segment(s + 1) == queue) continue;
      plan.partial.items.push_back(
          {first, s + 1, item.table, item.split_begin, item.split_end, queue, item.cost * (double)tokens / (double)all});
      first = s + 1;
      tokens = 0;
    }
  }

  // Queues for items without one, those with the least to do first; then each queue's items together.
  void arrange(Work& work) const {
    std::vector<Item>& items = work.items;
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    std::vector<double> load(queues, 0.0);
    for (const Item& item : items)
      if (item.queue >= 0) load[item.queue] += item.cost;
    for (Item& item : items) {
      if (item.queue >= 0) continue;
      item.queue = (int32_t)(std::min_element(load.begin(), load.end()) - load.begin());
      load[item.queue] += item.cost;
    }
    const double total = std::accumulate(load.begin(), load.end(), 0.0);
    work.is_fine = !items.empty() && items[0].cost * 8 * b.num_threads <= total;
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.queue < b.queue; });
    for (int q = 0; q <= queues; q++)
      work.starts.push_back((int32_t)(std::partition_point(items.begin(), items.end(),
                                                           [q](const Item& item) { return item.queue < q; }) -
                                      items.begin()));
  }
};

}  // namespace bi

using namespace bi;

// Returns null after a fault, with `fault` = {what, which sequence}; else the plan, which borrows the block tables.
BI_EXPORT Plan* bi_plan_create(const Batch* batch, int32_t* fault) {
  const Batch& b = *batch;
  Plan* plan = new Plan{b.tables, b.table_stride, b.query_start[b.num_sequences], 0, b.block_size, {}, {}, {}, {}};
  const std::vector<int32_t> none(b.num_sequences, -1);
  Planner planner{b, *plan, {}, {}, std::vector<int32_t>(b.num_sequences), none, std::min(b.num_threads, Team::MAX_QUEUES)};
  for (int i = 0; i < b.num_sequences; i++)
    if ((fault[0] = planner.check(i)) != OK) {
      fault[1] = i;
      delete plan;
      return nullptr;
    }
  plan->partial_of.assign(plan->num_tokens, -1);
  planner.find_prefixes();
  planner.group(0, planner.order.size(), 0);
  planner.forget_unshared();
  if (b.num_threads > 1) planner.find_queues();
  planner.add_own_work();
  if (b.num_threads > 1) planner.balance();
  planner.arrange(plan->partial);
  planner.arrange(plan->last);
  return plan;
}

BI_EXPORT int64_t bi_plan_num_partials(const Plan* plan) { return plan->num_partials; }
BI_EXPORT int64_t bi_plan_num_tokens(const Plan* plan) { return plan->num_tokens; }
BI_EXPORT void bi_plan_free(Plan* plan) { delete plan; }
