// Paged attention of a packed batch of prefill chunks and decode tokens.
#include "attention_tile.h"

namespace bi {

// Whether the heaviest, which is the first, is an eighth of what each thread has to do at most.
static bool are_small(const std::vector<Item>& items) {
  double total = 0.0;
  for (const Item& item : items) total += item.cost;
  return !items.empty() && items[0].cost * 8 * omp_get_num_threads() <= total;
}

template <class C>
static void attend(const Plan& plan, const Cache& cache, const Attention& call) {
  const int64_t heads = cache.num_kv_heads;
  auto run = [&](const std::vector<Item>& items, bool is_final) {
    // Heads of one row lie side by side, so a thread takes them all where no row is much of the work.
    const int64_t count = (int64_t)items.size() * heads, taken = are_small(items) ? heads : 1;
    auto after = [&](int64_t i) { return (i + 1) % taken ? i + 1 : Team::claim() * taken; };
    for (int64_t i = Team::claim() * taken, next; i < count; i = next) {
      Ahead ahead;
      next = after(i);
      if (next < count) ahead.find(plan, cache, call.window, items[next / heads], (int)(next % heads));
      Tile<C>(call, cache, (int)(i % heads), scratch(Tile<C>::floats(cache)), ahead).run(plan, items[i / heads], is_final);
    }
    Team::wait();
  };
  if (!plan.partial_items.empty()) run(plan.partial_items, false);  // else a barrier less
  run(plan.final_items, true);
}

void attention(const Plan& plan, const Cache& cache, const Attention& call) {
  if (cache.kind == F32) attend<F32Cache>(plan, cache, call);
  else if (cache.kind == I8) attend<I8Cache>(plan, cache, call);
  else attend<BF16Cache>(plan, cache, call);
}

}  // namespace bi

BI_EXPORT void bi_attention(const bi::Plan* plan, const bi::Cache* cache, const bi::Attention* call, int threads) {
  bi::Team::run(threads, [&] { bi::attention(*plan, *cache, *call); });
}
