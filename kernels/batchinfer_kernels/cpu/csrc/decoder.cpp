// All layers of a decoder's step in one parallel region: the ops of the other files one after another, without a return
// to Python and without waking threads between them. Bytes are those of the ops called one by one.
#include <algorithm>
#include <chrono>

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
  void* rows;         // what a product reads, [tokens, widest input]
  float* row_scale;   // [tokens], of I8
  void* product;      // [tokens, widest padded output], four bytes each
  void* gated;        // what `down` reads, [mlp_tokens, its input]
  void* added;        // what `down` gives, [tokens, its padded output], four bytes each
  void* query;        // [tokens, heads, head_dim] in query_kind
  void* attended;     // [tokens, heads, v_head_dim], likewise
  int64_t* spent;     // nanoseconds by Part; added to
  int64_t outside;    // positions or slots that lay outside of their tables
  int64_t mlp_tokens;  // that go through gate_up and down together: what lies between them stays in the cores' caches
  int32_t query_kind;
};

enum Part { GEMM = 0, ATTENTION = 1, ELEMENTWISE = 2 };  // mirrored in native_decoder.py

class Clock {  // of the region's first thread; parts end at barriers
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

static void attend(const Layer& layer, const Cache& cache, const Step& step, std::atomic<int64_t>& outside, Clock* clock) {
  const int64_t q_width = (int64_t)layer.num_q_heads * cache.head_dim, k_width = (int64_t)cache.num_kv_heads * cache.head_dim;
  const Source query = product_of(layer.qkv, step.product, step.row_scale);
  const Source key = product_of(layer.qkv, step.product, step.row_scale, q_width);
  const Source value = product_of(layer.qkv, step.product, step.row_scale, q_width + k_width);
  const RopeCall call = {&query,     &key,        &value,      &layer.rope,      step.positions, layer.num_positions,
                         step.slots, step.tokens, layer.num_q_heads};
  rope_and_kv_write(call, cache, {step.query, nullptr, nullptr, step.query_kind, 0}, outside);
  if (clock) clock->end(ELEMENTWISE);
  attention(*step.plan, cache,
            {step.query, step.attended, nullptr, step.workspace, q_width, step.query_kind, step.query_kind,
             layer.num_q_heads, layer.window, layer.scale, layer.softcap});
  if (clock) clock->end(ATTENTION);
}

static void run_mlp(const Layer& layer, const Step& step, Clock* clock) {
  for (int64_t first = 0; first < step.tokens; first += step.mlp_tokens) {
    const int64_t tokens = std::min(step.mlp_tokens, step.tokens - first);
    float* row_scale = step.row_scale + first;
    multiply((const char*)step.rows + first * row_bytes(layer.gate_up.weights), tokens, layer.gate_up.weights, step.product);
    if (clock) clock->end(GEMM);
    act_and_mul(product_of(layer.gate_up, step.product, row_scale), layer.activation, tokens, layer.down.weights.k,
                sink(layer.down, step.gated, row_scale));
    if (clock) clock->end(ELEMENTWISE);
    multiply(step.gated, tokens, layer.down.weights, (char*)step.added + first * padded_columns(layer.down.weights) * 4);
    if (clock) clock->end(GEMM);
  }
}

static void run_layer(const Layer& layer, const Linear* before, const Cache& cache, const Step& step,
                      std::atomic<int64_t>& outside, Clock* clock) {
  const int64_t tokens = step.tokens, hidden = step.hidden;
  auto enter = [&](const Source& x, void* residual, const Norm& norm, const Linear& to) {  // rows for `to`
    rms_norm(x, residual, F32, norm, tokens, hidden, sink(to, step.rows, step.row_scale));
    if (clock) clock->end(ELEMENTWISE);
  };
  auto run = [&](const Linear& linear, const void* rows) {
    multiply(rows, tokens, linear.weights, step.product);
    if (clock) clock->end(GEMM);
  };
  if (before)
    enter(product_of(*before, step.added, step.row_scale), step.residual, layer.attention_norm, layer.qkv);
  else
    enter({step.residual, hidden, nullptr, nullptr, nullptr, F32}, nullptr, layer.attention_norm, layer.qkv);
  run(layer.qkv, step.rows);
  attend(layer, cache, step, outside, clock);
  const int64_t width = layer.o.weights.k;
  const bool fits = layer.o.weights.kind == BF16 && step.query_kind == BF16;
  if (!fits) {
    convert({step.attended, width, nullptr, nullptr, nullptr, step.query_kind}, tokens, width,
            sink(layer.o, step.rows, step.row_scale));
    if (clock) clock->end(ELEMENTWISE);
  }
  run(layer.o, fits ? step.attended : step.rows);
  enter(product_of(layer.o, step.product, step.row_scale), step.residual, layer.mlp_norm, layer.gate_up);
  run_mlp(layer, step, clock);
}

}  // namespace bi

using namespace bi;

// Runs the layers; what the last one still has to add to the residual is left in step.added and step.row_scale.
BI_EXPORT void bi_decoder_layers(const Layer* layers, const Cache* caches, int64_t num_layers, Step* step, int threads) {
  std::atomic<int64_t> outside{0};
  Clock clock(step->spent);
  Team team;
#pragma omp parallel num_threads(threads)
  {
    team.enter();
    Clock* mine = nullptr;
#pragma omp master
    mine = &clock;
    for (int64_t i = 0; i < num_layers; i++)
      run_layer(layers[i], i ? &layers[i - 1].down : nullptr, caches[i], *step, outside, mine);
    Team::leave();
  }
  step->outside = outside;
}

// The head, a slice of the words after another: rows and row_scale as its first slice reads them, product [rows, widest
// padded slice].
BI_EXPORT void bi_decoder_head(const Linear* slices, int64_t num_slices, const void* rows, const float* row_scale,
                                int64_t num_rows, void* product, float scale, float softcap, const Reduction* reduction,
                                int threads) {
  Team team;
#pragma omp parallel num_threads(threads)
  {
    team.enter();
    for (int64_t i = 0, first = 0; i < num_slices; first += slices[i].weights.n, i++) {
      multiply(rows, num_rows, slices[i].weights, product);
      reduce_logits(product_of(slices[i], product, row_scale), num_rows, slices[i].weights.n, first, scale, softcap,
                    *reduction);
    }
    Team::leave();
  }
}
