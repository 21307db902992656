// All layers of a decoder's step in one parallel region: the ops of the other files one after another, without a return
// to Python and without waking threads between them. Bytes are those of the ops called one by one.
#include <algorithm>
#include <chrono>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "row_ops.h"

namespace bi {

struct Linear {  // mirrored in library.py
  Packed weights;
  const float* column_scale;  // of I8, else null
  const float* bias;          // null without
  const float* smoothing;     // of I8: what its rows are multiplied by before they are rotated; null without
  int32_t rotation;
};

struct Layer {  // x += o(attention(qkv(norm(x)))), then x += down(act(gate_up(norm(x)))); mirrored in library.py
  Linear qkv, o, gate_up, down;
  Norm attention_norm, mlp_norm;
  Rope rope;
  int64_t num_positions;  // of the rope's tables
  int32_t num_q_heads;
  int32_t activation;
  int32_t window;
  float scale;
  float softcap;
};

struct Step {  // mirrored in library.py
  float* residual;  // [tokens, hidden]
  int64_t tokens;
  int64_t hidden;
  const int64_t* positions;
  const int64_t* slots;
  const Plan* plan;
  float* workspace;   // of attention
  void* rows;         // what a product reads, [room, row_bytes]
  float* row_scale;   // [tokens], of I8
  void* product;      // [room, columns], four bytes each
  float* gated;       // [room, widest input of `down`]
  void* added;        // what the last layer's `down` gives, [tokens, its padded output], four bytes each
  void* query;        // [tokens, heads, head_dim] in query_kind
  void* attended;     // [tokens, heads, v_head_dim], likewise
  int64_t* spent;     // nanoseconds by Part; added to
  int64_t outside;    // positions or slots that lay outside of their tables
  int64_t row_bytes, columns, gated_columns;  // from row to row of those buffers
  int64_t block;  // tokens that a thread takes from attention to attention by itself; 0: threads share each op
  int32_t query_kind;
};

enum Part { GEMM = 0, ATTENTION = 1, ELEMENTWISE = 2 };  // mirrored in native_decoder.py

class Clock {  // of the region's first thread; parts end at barriers, or with its own part of them in blocks
  int64_t* spent;
  std::chrono::steady_clock::time_point last = std::chrono::steady_clock::now();

 public:
  explicit Clock(int64_t* spent) : spent(spent) {}
  void end(Part part) {
    const auto now = std::chrono::steady_clock::now();
    spent[part] += std::chrono::duration_cast<std::chrono::nanoseconds>(now - last).count();
    last = now;
  }
};

static Sink sink(const Linear& linear, void* rows, float* row_scale) {
  const bool is_int8 = linear.weights.kind == I8;
  return {rows, is_int8 ? row_scale : nullptr, linear.smoothing, linear.weights.kind, linear.rotation};
}

static int64_t bytes_of(int32_t kind) { return kind == F32 ? 4 : 2; }

// A linear's product, from column `first` on.
static Source product_of(const Linear& linear, const void* product, const float* row_scale, int64_t first = 0) {
  const bool is_int8 = linear.weights.kind == I8;
  return {(const char*)product + first * 4,
          padded_columns(linear.weights),
          is_int8 ? row_scale : nullptr,
          is_int8 ? linear.column_scale + first : nullptr,
          linear.bias ? linear.bias + first : nullptr,
          is_int8 ? I32 : F32};
}

static Scales scales_of(const Linear& linear, const float* row_scale) {
  const Source product = product_of(linear, nullptr, row_scale);
  return {product.row_scale, product.column_scale, product.bias};
}

// Tokens that go through a layer's ops, by all threads of the team or by one of them alone, and where what lies between
// the ops is kept: row 0 is the first of these tokens.
struct Tokens {
  int64_t first, count;
  bool alone;
  char* rows;
  float* row_scale;
  char* product;
  float* gated;
  Clock* clock;  // null of all threads but one

  Range mine() const { return alone ? Range{0, count} : Team::share(count); }
  void end(Part part) const {
    if (!alone) Team::wait();
    if (clock) clock->end(part);
  }
  void multiply(const Linear& linear, const void* by, void* out) const {
    bi::multiply(by, count, linear.weights, out, alone);
    if (clock) clock->end(GEMM);
  }
};

static Tokens together(const Step& step, Clock* clock) {
  return {0, step.tokens, false, (char*)step.rows, step.row_scale, (char*)step.product, step.gated, clock};
}

// In the calling thread's own room.
static Tokens block_of(const Step& step, int64_t index, Clock* clock) {
  const int64_t first = index * step.block, room = omp_get_thread_num() * step.block;
  return {first,
          std::min(step.block, step.tokens - first),
          true,
          (char*)step.rows + room * step.row_bytes,
          step.row_scale + first,
          (char*)step.product + room * step.columns * 4,
          step.gated + room * step.gated_columns,
          clock};
}

static float* residual_of(const Step& step, const Tokens& tokens) { return step.residual + tokens.first * step.hidden; }

// The norm of x, added to the residual where `is_added`, as the rows that `to` reads.
static void enter(const Source& x, bool is_added, const Norm& norm, const Linear& to, const Step& step, const Tokens& tokens) {
  rms_norm(x, is_added ? residual_of(step, tokens) : nullptr, F32, norm, tokens.mine(), step.hidden,
           sink(to, tokens.rows, tokens.row_scale));
  tokens.end(ELEMENTWISE);
}

// From what the layer before left (null: nothing) to queries, and keys and values in the cache.
static void before_attention(const Layer& layer, const Linear* before, const Cache& cache, const Step& step,
                             const Tokens& tokens, std::atomic<int64_t>& outside) {
  if (before)
    enter(product_of(*before, tokens.product, tokens.row_scale), true, layer.attention_norm, layer.qkv, step, tokens);
  else
    enter({residual_of(step, tokens), step.hidden, nullptr, nullptr, nullptr, F32}, false, layer.attention_norm, layer.qkv,
          step, tokens);
  tokens.multiply(layer.qkv, tokens.rows, tokens.product);
  const int64_t q_width = (int64_t)layer.num_q_heads * cache.head_dim, k_width = (int64_t)cache.num_kv_heads * cache.head_dim;
  const Source query = product_of(layer.qkv, tokens.product, tokens.row_scale);
  const Source key = product_of(layer.qkv, tokens.product, tokens.row_scale, q_width);
  const Source value = product_of(layer.qkv, tokens.product, tokens.row_scale, q_width + k_width);
  char* query_out = (char*)step.query + tokens.first * q_width * bytes_of(step.query_kind);
  rope_and_kv_write({&query, &key, &value, &layer.rope, step.positions + tokens.first, layer.num_positions,
                     step.slots + tokens.first, tokens.mine(), layer.num_q_heads},
                    cache, {query_out, nullptr, nullptr, step.query_kind, 0}, outside);
  tokens.end(ELEMENTWISE);
}

static void attend(const Layer& layer, const Cache& cache, const Step& step, Clock* clock) {
  attention(*step.plan, cache,
            {step.query, step.attended, nullptr, step.workspace, (int64_t)layer.num_q_heads * cache.head_dim,
             step.query_kind, step.query_kind, layer.num_q_heads, layer.window, layer.scale, layer.softcap});
  if (clock) clock->end(ATTENTION);
}

// From attention's result to what the layer still has to add, which is left in `added`.
static void after_attention(const Layer& layer, const Step& step, const Tokens& tokens, void* added) {
  const int64_t width = layer.o.weights.k, inner = layer.down.weights.k;
  const void* attended = (char*)step.attended + tokens.first * width * bytes_of(step.query_kind);
  if (layer.o.weights.kind != BF16 || step.query_kind != BF16) {
    convert({attended, width, nullptr, nullptr, nullptr, step.query_kind}, tokens.mine(), width,
            sink(layer.o, tokens.rows, tokens.row_scale));
    tokens.end(ELEMENTWISE);
    attended = tokens.rows;
  }
  tokens.multiply(layer.o, attended, tokens.product);
  enter(product_of(layer.o, tokens.product, tokens.row_scale), true, layer.mlp_norm, layer.gate_up, step, tokens);
  multiply_gated(tokens.rows, tokens.count, layer.gate_up.weights, scales_of(layer.gate_up, tokens.row_scale),
                 layer.activation, tokens.gated, tokens.alone);
  if (tokens.clock) tokens.clock->end(GEMM);
  const Range mine = tokens.mine();
  for (int64_t m = mine.first; m < mine.last; m++)
    emit_row(sink(layer.down, tokens.rows, tokens.row_scale), m, tokens.gated + m * inner, inner);
  tokens.end(ELEMENTWISE);
  tokens.multiply(layer.down, tokens.rows, added);
}

// Of few tokens: threads share the columns of each product, so that weights are read once.
static void run_together(const Layer* layers, const Cache* caches, int64_t num_layers, const Step& step,
                         std::atomic<int64_t>& outside, Clock* clock) {
  const Tokens tokens = together(step, clock);
  for (int64_t i = 0; i < num_layers; i++) {
    before_attention(layers[i], i ? &layers[i - 1].down : nullptr, caches[i], step, tokens, outside);
    attend(layers[i], caches[i], step, clock);
    after_attention(layers[i], step, tokens, i + 1 < num_layers ? step.product : step.added);
  }
}

// Of many tokens: threads take a block of them from attention to attention, so that what lies between the ops stays in a
// core's own cache.
static void run_in_blocks(const Layer* layers, const Cache* caches, int64_t num_layers, const Step& step,
                          std::atomic<int64_t>& outside, Clock* clock) {
  const int64_t num_blocks = (step.tokens + step.block - 1) / step.block;
  for (int64_t i = -1; i < num_layers; i++) {
    const Layer* before = i < 0 ? nullptr : layers + i;
    const bool is_last = i + 1 == num_layers;
    if (before) attend(*before, caches[i], step, clock);
    for (int64_t b; (b = Team::claim()) < num_blocks;) {
      const Tokens tokens = block_of(step, b, clock);
      if (before)
        after_attention(*before, step, tokens,
                        is_last ? (char*)step.added + tokens.first * padded_columns(before->down.weights) * 4 : tokens.product);
      if (!is_last)
        before_attention(layers[i + 1], before ? &before->down : nullptr, caches[i + 1], step, tokens, outside);
    }
    Team::wait();
    if (clock) clock->end(GEMM);  // most of what it waited for
  }
}

// The best word of each row: threads look at a part of the words each, and no logits are written.
static void find_best(const Linear* slices, int64_t num_slices, const void* rows, const float* row_scale, int64_t num_rows,
                      float scale, std::vector<Largest>& seen, const Reduction& out) {
  Largest* mine = seen.data() + omp_get_thread_num() * num_rows;
  for (int64_t i = 0, first = 0; i < num_slices; first += slices[i].weights.n, i++)
    multiply_largest(rows, num_rows, slices[i].weights, scales_of(slices[i], row_scale), scale, first, mine);
  const Range range = Team::share(num_rows);
  for (int64_t m = range.first; m < range.last; m++)
    for (const Largest* one = seen.data() + m; one < seen.data() + seen.size(); one += num_rows) {
      out.has_nan[m] |= one->has_nan;
      const bool is_better = one->value > out.best[m] || (one->value == out.best[m] && one->column < out.best_index[m]);
      if (one->column < 0 || !is_better) continue;
      out.best[m] = one->value;
      out.best_index[m] = one->column;
    }
}

}  // namespace bi

using namespace bi;

// Runs the layers; what the last one still has to add to the residual is left in step.added and step.row_scale.
BI_EXPORT void bi_decoder_layers(const Layer* layers, const Cache* caches, int64_t num_layers, Step* step, int threads) {
  std::atomic<int64_t> outside{0};
  Clock clock(step->spent);
  Team::run(threads, [&] {
    (step->block ? run_in_blocks : run_together)(layers, caches, num_layers, *step, outside,
                                                 omp_get_thread_num() ? nullptr : &clock);
  });
  step->outside = outside;
}

// The head, a slice of the words after another: rows and row_scale as its first slice reads them, product [rows, widest
// padded slice].
BI_EXPORT void bi_decoder_head(const Linear* slices, int64_t num_slices, const void* rows, const float* row_scale,
                                int64_t num_rows, void* product, float scale, float softcap, const Reduction* reduction,
                                int threads) {
  const bool is_only_best = !reduction->peak && !reduction->top_values && !reduction->place && !(softcap > 0.0f);
  std::vector<Largest> seen(is_only_best ? threads * num_rows : 0);
  Team::run(threads, [&] {
    if (is_only_best) {
      find_best(slices, num_slices, rows, row_scale, num_rows, scale, seen, *reduction);
      return;
    }
    for (int64_t i = 0, first = 0; i < num_slices; first += slices[i].weights.n, i++) {
      multiply(rows, num_rows, slices[i].weights, product, false);
      reduce_logits(product_of(slices[i], product, row_scale), Team::share(num_rows), slices[i].weights.n, first, scale,
                    softcap, *reduction);
      Team::wait();
    }
  });
}
