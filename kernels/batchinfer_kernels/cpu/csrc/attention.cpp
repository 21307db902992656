// Paged attention of a packed batch of prefill chunks and decode tokens.
#include "attention_tile.h"

namespace bi {

template <class C>
static void attend(const Plan& plan, const Cache& cache, const Attention& call) {
  const int64_t heads = cache.num_kv_heads;
  auto run = [&](const std::vector<Item>& items, int64_t i, bool is_final) {
    Tile<C>(call, cache, (int)(i % heads), scratch(Tile<C>::floats(cache))).run(plan, items[i / heads], is_final);
  };
  if (!plan.partial_items.empty()) {  // else a barrier less
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < (int64_t)plan.partial_items.size() * heads; i++) run(plan.partial_items, i, false);
    Team::wait();
  }
#pragma omp for schedule(dynamic, 1) nowait
  for (int64_t i = 0; i < (int64_t)plan.final_items.size() * heads; i++) run(plan.final_items, i, true);
  Team::wait();
}

void attention(const Plan& plan, const Cache& cache, const Attention& call) {
  if (cache.kind == F32) attend<F32Cache>(plan, cache, call);
  else if (cache.kind == I8) attend<I8Cache>(plan, cache, call);
  else attend<BF16Cache>(plan, cache, call);
}

}  // namespace bi

BI_EXPORT void bi_attention(const bi::Plan* plan, const bi::Cache* cache, const bi::Attention* call, int threads) {
#pragma omp parallel num_threads(threads)
  bi::attention(*plan, *cache, *call);
}
