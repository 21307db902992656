// Paged attention of a packed batch of prefill chunks and decode tokens.
#include "attention_tile.h"

namespace bi {

// Gives the heads of items, item * heads + head, to the calling thread.
class Claims {
  const Work& work;
  const int64_t heads, taken;  // at a time: heads of one row lie side by side
  const int queues;
  int queue, left;
  int64_t last = -1;

 public:
  Claims(const Work& work, int64_t heads)
      : work(work), heads(heads), taken(work.is_fine ? heads : 1), queues((int)work.starts.size() - 1),
        queue(omp_get_thread_num() % queues), left(queues) {}

  int64_t next() {  // -1: there are no more
    if (last >= 0 && (last + 1) % taken) return ++last;
    for (; left > 0; left--, queue = (queue + 1) % queues) {
      const int64_t begin = work.starts[queue] * heads, at = begin + Team::claim(queue) * taken;
      if (at < work.starts[queue + 1] * heads) return last = at;
    }
    return last = -1;
  }
};

template <class C>
static void attend(const Plan& plan, const Cache& cache, const Attention& call) {
  const int64_t heads = cache.num_kv_heads;
  auto run = [&](const Work& work, bool is_final) {
    Claims claims(work, heads);
    for (int64_t i = claims.next(), next; i >= 0; i = next) {
      Ahead ahead;
      next = claims.next();
      if (Tile<C>::ASKS_AHEAD && next >= 0) ahead.find(plan, cache, call.window, work.items[next / heads], (int)(next % heads));
      Tile<C>(call, cache, (int)(i % heads), scratch(Tile<C>::floats(cache)), ahead)
          .run(plan, work.items[i / heads], is_final);
    }
    Team::wait();
  };
  if (!plan.partial.items.empty()) run(plan.partial, false);  // else a barrier less
  run(plan.last, true);
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
