// Paged attention of a packed batch of prefill chunks and decode tokens.
#include "attention_tile.h"

namespace bi {

template <class C>
static void attend(const Plan& plan, const Cache& cache, const Attention& call) {
  const int64_t heads = cache.num_kv_heads;
  auto run = [&](const std::vector<Item>& items, bool is_final) {
    // Heads of one row lie side by side, so a thread takes them all where there is enough to share.
    const int64_t count = (int64_t)items.size() * heads, taken = (int64_t)items.size() < 8 * omp_get_num_threads() ? 1 : heads;
    auto claim = [&] { return Team::claim() * taken; };
    for (int64_t i = claim(), next; i < count; i = next) {
      next = (i + 1) % taken ? i + 1 : claim();
      Ahead ahead;
      if (C::KIND == I8 && next < count) ahead.find(plan, cache, call.window, items[next / heads], (int)(next % heads));
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
