// One tile: up to MAX_ROWS query rows of one kv head, split after split.
#pragma once
#include <algorithm>
#include <utility>

#include "attention_ahead.h"
#include "attention_kernels.h"
#include "attention_tiles.h"
#include "attention.h"

namespace bi {

constexpr int STRIDE = SPLIT + 16;  // of a row of scores; a power of two would crowd a few cache sets
constexpr int KEPT_STATE = 16;      // numbers that a state takes in the workspace, so that lines are whole

// Up to so many rows, a tile waits for memory and not for arithmetic: with ASKS_AHEAD it asks for what is next, else for
// its own values while keys are multiplied.
constexpr int FEW_ROWS = 12;

// Softmax over what a row has seen: weights are relative to `peak` and sum to `total`.
struct State {
  float peak, total;
};

static inline void merge(State& a, float* a_out, const State& b, const float* b_out, int64_t n) {
  if (b.peak == -INFINITY) return;
  const float peak = a.peak > b.peak ? a.peak : b.peak;
  const float from_a = a.peak == -INFINITY ? 0.0f : exp_scalar(a.peak - peak), from_b = exp_scalar(b.peak - peak);
  a = {peak, a.total * from_a + b.total * from_b};
  for (int64_t i = 0; i < n; i += W) store(a_out + i, fma(load(b_out + i), splat(from_b), load(a_out + i) * from_a));
}

template <class C>
class Tile {
  typedef typename C::Word Word;
  typedef typename C::Left Left;
  static constexpr int STEPS = SPLIT / C::PAIR, TILE_STEPS = TILE / C::PAIR;
  static constexpr bool IS_I8 = C::KIND == I8;
  static constexpr bool IN_TILES = BI_TILES && C::PAIR == 2;
  static constexpr int MASKED = IN_TILES && !IS_I8 ? STEPS : 2;  // rows of values of which some numbers are hidden
  struct Row {
    int64_t token;
    int32_t head, low, high;  // sees positions low .. high
  };

  const Attention& call;
  const Cache& cache;
  Ahead& next_item;
  const int kv_head, queries_per_kv_head;
  const int64_t dim, v_dim;  // padded
  int count = 0;
  int low = 0, high = 0;              // what any of the rows sees
  int last_low = 0, first_high = 0;  // and what all of them do
  Row rows[MAX_ROWS];
  State split_state[MAX_ROWS], state[MAX_ROWS];
  float best[MAX_ROWS];  // scores of a split, before they are scaled
  const Word* columns[SPLIT / W];
  const Word* values[STEPS];
  Left *q, *p;
  float *scores, *split_out, *out;
  Word* masked;
  Word* wide;  // of INT8: a split's keys, then its values, as bf16
  float key_scales[IS_I8 ? SPLIT : 1], value_scales[IS_I8 ? SPLIT : 1];

 public:
  // Without tiles, values that are not widened are multiplied for so long that asking for them is enough.
  static constexpr bool ASKS_AHEAD = IN_TILES || IS_I8;

  static size_t floats(const Cache& c) {
    const size_t dim = padded(c.head_dim), v_dim = padded(c.v_head_dim);
    return MAX_ROWS * (dim + 2 * STRIDE + 2 * v_dim) + MASKED * v_dim + (IS_I8 ? SPLIT / 2 * std::max(dim, v_dim) : 0);
  }

  Tile(const Attention& call, const Cache& cache, int kv_head, float* buffer, Ahead& next_item)
      : call(call), cache(cache), next_item(next_item), kv_head(kv_head),
        queries_per_kv_head(call.num_q_heads / cache.num_kv_heads),
        dim(padded(cache.head_dim)), v_dim(padded(cache.v_head_dim)) {
    scores = buffer;
    p = (Left*)(scores + MAX_ROWS * STRIDE);
    q = (Left*)((float*)p + MAX_ROWS * STRIDE);
    split_out = (float*)q + MAX_ROWS * dim;
    out = split_out + MAX_ROWS * v_dim;
    masked = (Word*)(out + MAX_ROWS * v_dim);
    wide = masked + MASKED * v_dim;
  }

  void run(const Plan& plan, const Item& item, bool is_final) {
    count = 0;
    for (int s = item.segment_begin; s < item.segment_end; s++) {
      const Segment& segment = plan.segments[s];
      for (int t = 0; t < segment.count; t++)
        for (int g = 0; g < queries_per_kv_head; g++) {
          add_row(segment.token + t, g, segment.position + t);
          if (count == MAX_ROWS) run_rows(plan, item, is_final);
        }
    }
    if (count) run_rows(plan, item, is_final);
  }

 private:
  void add_row(int64_t token, int group, int position) {
    const int head = kv_head * queries_per_kv_head + group, n = cache.head_dim;
    const int seen_from = call.window > 0 ? std::max(0, position + 1 - call.window) : 0;
    rows[count] = {token, head, seen_from, position + 1};
    low = count ? std::min(low, seen_from) : seen_from;
    high = count ? std::max(high, position + 1) : position + 1;
    last_low = count ? std::max(last_low, seen_from) : seen_from;
    first_high = count ? std::min(first_high, position + 1) : position + 1;
    Left* to = q + count++ * dim;
    const int64_t at = token * call.query_stride + (int64_t)head * n;
    if constexpr (IS_I8)
      load_lifted(to, at, n);
    else if (call.query_kind == F32)
      C::load_left(to, (const float*)call.query + at, n);
    else
      C::load_left(to, (const uint16_t*)call.query + at, n);
    for (int d = n; d < dim; d++) to[d] = 0;
  }

  // The row of scores is free until the query has been read.
  void load_lifted(Left* to, int64_t at, int n) {
    if (call.query_kind == F32)
      memcpy(scores, (const float*)call.query + at, n * sizeof(float));
    else
#pragma omp simd
      for (int d = 0; d < n; d++) scores[d] = from_bf16(((const uint16_t*)call.query)[at + d]);
    if (cache.key_rotation) rotate(scores, n, cache.key_rotation);
#pragma omp simd
    for (int d = 0; d < n; d++) scores[d] *= C::LIFT;
    C::load_left(to, scores, n);
  }

  void run_rows(const Plan& plan, const Item& item, bool is_final) {
    const int32_t* table = plan.tables + item.table * plan.table_stride;
    bool is_empty = is_final && !start(plan, item.split_begin);
    Ahead nothing;
    for (int s = item.split_begin; s < item.split_end && s * SPLIT < high; s++) {
      const int end = (s + 1) * SPLIT;
      if (end <= low) continue;
      if (!ASKS_AHEAD || count > FEW_ROWS) {
        compute(s * SPLIT, table, nothing);
      } else if (s + 1 < item.split_end && end < high) {
        Ahead next_split;
        next_split.find(cache, table, kv_head, end, std::min(high, end + SPLIT));
        compute(s * SPLIT, table, next_split);
      } else {
        compute(s * SPLIT, table, next_item);
      }
      if (is_empty) {  // merging with nothing gives the same bits as taking the split as it is
        std::swap(out, split_out);
        std::copy(split_state, split_state + count, state);
        is_empty = false;
        continue;
      }
      for (int r = 0; r < count; r++)
        if (is_final)
          merge(state[r], out + r * v_dim, split_state[r], split_out + r * v_dim, v_dim);
        else
          keep(plan, r, s);
    }
    if (is_final)
      for (int r = 0; r < count; r++) finish(r);
    count = 0;
  }

  float* partial(const Plan& plan, int r, int split) const {
    const int64_t entry = (plan.partial_of[rows[r].token] + split) * call.num_q_heads + rows[r].head;
    return call.workspace + entry * (v_dim + KEPT_STATE);
  }

  void keep(const Plan& plan, int r, int split) const {
    float* to = partial(plan, r, split);
    memcpy(to + v_dim, &split_state[r], sizeof(State));
    if (split_state[r].peak != -INFINITY) memcpy(to, split_out + r * v_dim, v_dim * sizeof(float));
  }

  // Begin with what was kept of the splits before `split_begin`; false if there are none.
  bool start(const Plan& plan, int split_begin) {
    if (split_begin <= low / SPLIT) return false;
    for (int r = 0; r < count; r++) {
      state[r] = {-INFINITY, 0.0f};
      float* to = out + r * v_dim;
      for (int s = rows[r].low / SPLIT; s < split_begin; s++) {  // a split past the row's end was kept as empty
        const float* from = partial(plan, r, s);
        State kept;
        memcpy(&kept, from + v_dim, sizeof(State));
        if (state[r].peak != -INFINITY) {
          merge(state[r], to, kept, from, v_dim);
        } else if (kept.peak != -INFINITY) {  // the same bits as merging it with nothing
          state[r] = kept;
          memcpy(to, from, v_dim * sizeof(float));
        }
      }
      if (state[r].peak == -INFINITY) memset(to, 0, v_dim * sizeof(float));
    }
    return true;
  }

  void finish(int r) {
    if (IS_I8 && cache.value_rotation) rotate(out + r * v_dim, cache.v_head_dim, cache.value_rotation);
    float scale = 1.0f, total = state[r].total;
    if (call.sinks) {  // a sink takes its share of the softmax and gives nothing
      const float sink = call.sinks[rows[r].head], peak = sink > state[r].peak ? sink : state[r].peak;
      scale = exp_scalar(state[r].peak - peak);
      total = total * scale + exp_scalar(sink - peak);
    }
    const float factor = scale / total * C::DROP, *from = out + r * v_dim;
    const int n = cache.v_head_dim;
    const int64_t at = (rows[r].token * call.num_q_heads + rows[r].head) * n;
    if (call.out_kind == F32)
#pragma omp simd
      for (int d = 0; d < n; d++) ((float*)call.out)[at + d] = from[d] * factor;
    else
#pragma omp simd
      for (int d = 0; d < n; d++) ((uint16_t*)call.out)[at + d] = to_bf16(from[d] * factor);
  }

  // The tile's rows over positions base .. base + SPLIT: split_state and split_out.
  void compute(int base, const int32_t* table, Ahead& ahead) {
    const int begin = std::max(low - base, 0), end = std::min(high - base, SPLIT);
    const int first_tile = begin / TILE, last_tile = (end + TILE - 1) / TILE;
    if (ASKS_AHEAD) ahead.divide(num_asks(first_tile, last_tile));
    find_tokens(base, first_tile, last_tile, table, ahead);
#if BI_TILES
    if constexpr (IN_TILES) {
      compute_in_tiles(base, end, first_tile, last_tile, table, ahead);
      return;
    }
#endif
    score(base, begin / W, (end + W - 1) / W);
    memset(split_out, 0, count * v_dim * sizeof(float));
    softmax(base);
    if constexpr (IS_I8) widen_values(base, first_tile, last_tile, table, ahead);
    const int groups = (count + MAX_R - 1) / MAX_R;
    for (int g = 0; g < groups; g++) weigh_group(g * count / groups, (g + 1) * count / groups, base);
  }

#if BI_TILES
  void compute_in_tiles(int base, int end, int first_tile, int last_tile, const int32_t* table, Ahead& ahead) {
    Groups all = {}, groups[SPLIT / TILE];
    int from_tile[MAX_GROUPS], to_tile[MAX_GROUPS];  // that a row of the group sees
    for (int g = 0; g < MAX_GROUPS; g++) {
      all.has[g] = g * GROUP < count;
      from_tile[g] = SPLIT / TILE, to_tile[g] = 0;
      for (int r = g * GROUP; r < std::min(count, (g + 1) * GROUP); r++) {
        from_tile[g] = std::min(from_tile[g], std::max(rows[r].low - base, 0) / TILE);
        to_tile[g] = std::max(to_tile[g], (std::min(rows[r].high - base, SPLIT) + TILE - 1) / TILE);
      }
    }
    use_attention_tiles(count);
    for (int t = first_tile; t < last_tile; t++) {
      for (int g = 0; g < MAX_GROUPS; g++) groups[t].has[g] = from_tile[g] <= t && t < to_tile[g];
      score_tile(groups[t], (const uint16_t*)q, dim, (const uint32_t*)columns[t], scores + t * TILE, STRIDE);
      ahead.ask();
    }
    softmax(base);
    for (int r = 0; r < count; r++) {
      const int from = std::max(rows[r].low - base, 0), to = std::min(rows[r].high - base, SPLIT);
      // tiles are multiplied for all of a group's rows
      const bool is_blind = from >= to;
      const int before = is_blind ? last_tile : from / TILE, after = is_blind ? last_tile : (to + TILE - 1) / TILE;
      Left* weights = p + r * STRIDE;
      if (before > first_tile) memset(weights + first_tile * TILE, 0, (before - first_tile) * TILE * sizeof(Left));
      if (after < last_tile) memset(weights + after * TILE, 0, (last_tile - after) * TILE * sizeof(Left));
    }
    if constexpr (IS_I8) {  // whole numbers: a weight of zero hides any
      widen_values(base, first_tile, last_tile, table, ahead);
      weigh_wide(all, groups, first_tile, last_tile, ahead);
    } else {
      weigh_in_tiles(base, end, all, groups, first_tile, last_tile, ahead);
    }
  }

  void weigh_in_tiles(int base, int end, const Groups& all, const Groups* groups, int first_tile, int last_tile,
                      Ahead& ahead) {
    const Word* seen_values[SPLIT / TILE];  // as they are
    for (int t = first_tile; t < last_tile; t++) seen_values[t] = values[t * TILE_STEPS];
    if (end % TILE) hide_tokens(last_tile - 1, end % TILE);
    bool is_poisoned[SPLIT / TILE];
    for (int t = first_tile; t < last_tile; t++) is_poisoned[t] = is_ragged(base, end, t) && hide_poison(t);
    for (int64_t d = 0; d < v_dim; d += TILE) {
      zero_sums(all);
      for (int t = first_tile; t < last_tile; t++) {
        weigh_tile(groups[t], (const uint16_t*)p + t * TILE, STRIDE, (const uint32_t*)values[t * TILE_STEPS] + d, v_dim);
        ahead.ask();
      }
      store_sums(all, split_out + d, v_dim);
    }
    for (int t = first_tile; t < last_tile; t++)
      if (is_poisoned[t]) spread_poison(base, t, seen_values[t]);
  }

  // Two tiles at a time, always the same two: sums within them are made before they are added to those of others. What was
  // widened lies in one piece; of two tiles, one may not be there.
  void weigh_wide(const Groups& all, const Groups* groups, int first_tile, int last_tile, Ahead& ahead) {
    const int begin = first_tile / 2 * 2, end = (last_tile + 1) / 2 * 2;
    if (begin < first_tile) clear_tile(begin);
    if (end > last_tile) clear_tile(last_tile);
    for (int64_t d = 0; d < v_dim; d += TILE) {
      zero_sums(all);
      for (int t = begin; t < end; t += 2) {
        Groups both;
        for (int g = 0; g < MAX_GROUPS; g++)
          both.has[g] = (t >= first_tile && groups[t].has[g]) || (t + 1 < last_tile && groups[t + 1].has[g]);
        weigh_two_tiles(both, (const uint16_t*)p + t * TILE, STRIDE, (const uint32_t*)wide + t * TILE_STEPS * v_dim + d,
                        v_dim);
        ahead.ask();
      }
      store_sums(all, split_out + d, v_dim);
    }
  }

  void clear_tile(int t) {
    memset(wide + t * TILE_STEPS * v_dim, 0, TILE_STEPS * v_dim * sizeof(Word));
    for (int r = 0; r < count; r++) memset(p + r * STRIDE + t * TILE, 0, TILE * sizeof(Left));
  }

  // Whether a row does not see a token of tile t that another row sees.
  bool is_ragged(int base, int end, int t) const {
    return last_low > base + t * TILE || first_high < base + std::min(end, (t + 1) * TILE);
  }

  static bool is_poison(uint32_t bf16) { return (bf16 & 0x7f80u) == 0x7f80u; }  // inf or NaN

  // Zeros in the place of every inf and NaN of a tile, since zero times those is NaN and a row with a weight of zero may
  // not see them; false if there is none.
  bool hide_poison(int t) {
    const Word** rows_of = values + t * TILE_STEPS;
    bool is_found = false;
    for (int i = 0; i < TILE_STEPS; i++)
      for (int d = 0; d < v_dim; d++) {
        const uint32_t word = (uint32_t)rows_of[i][d];
        is_found |= is_poison(word) || is_poison(word >> 16);
      }
    if (!is_found) return false;
    for (int i = 0; i < TILE_STEPS; i++) {
      Word* copy = masked + (t * TILE_STEPS + i) * v_dim;
      for (int d = 0; d < v_dim; d++) {
        const uint32_t word = (uint32_t)rows_of[i][d];
        copy[d] = (Word)(word & ((is_poison(word) ? 0u : 0xffffu) | (is_poison(word >> 16) ? 0u : 0xffff0000u)));
      }
      rows_of[i] = copy;
    }
    return true;
  }

  // What was hidden, for the rows that see it.
  void spread_poison(int base, int t, const Word* from) {
    for (int r = 0; r < count; r++)
      for (int token = 0; token < TILE; token++) {
        const int position = base + t * TILE + token;
        if (position < rows[r].low || position >= rows[r].high) continue;
        const float weight = from_bf16((uint16_t)p[r * STRIDE + t * TILE + token]);
        for (int d = 0; d < v_dim; d++) {
          const uint32_t value = (uint32_t)from[token / C::PAIR * v_dim + d] >> (token % C::PAIR * 16) & 0xffffu;
          if (is_poison(value)) split_out[r * v_dim + d] += weight * from_bf16((uint16_t)value);
        }
      }
  }

  // A tile of which only so many tokens were written: the others could hold a stale inf or NaN.
  void hide_tokens(int t, int seen) {
    const Word** rows_of = values + t * TILE_STEPS;
    for (int i = 0; i < TILE_STEPS; i++) {
      Word* copy = masked + (t * TILE_STEPS + i) * v_dim;
      memcpy(copy, rows_of[i], v_dim * sizeof(Word));
      C::mask(copy, (int)v_dim, 2 * i < seen, 2 * i + 1 < seen);
      rows_of[i] = copy;
    }
  }
#endif

  // How often what is next is asked for, evenly over the work of these tiles.
  int num_asks(int first_tile, int last_tile) const {
    const int tiles = last_tile - first_tile, widened = IS_I8 ? 2 * tiles : 0;
    if (!IN_TILES) return widened;
    const int weighed = IS_I8 ? (last_tile + 1) / 2 - first_tile / 2 : tiles;
    return widened + tiles + weighed * (int)(v_dim / TILE);
  }

  void find_tokens(int base, int first_tile, int last_tile, const int32_t* table, Ahead& ahead) {
    for (int t = first_tile; t < last_tile; t++) {
      const int position = base + t * TILE, block = position / cache.block_size, offset = position % cache.block_size;
      if constexpr (IS_I8) {
        widen_keys(t, table[block], offset);
        ahead.ask();
        continue;
      }
      const Word* key = (const Word*)key_tile(cache, table[block], kv_head, offset);
      const Word* value = (const Word*)value_tile(cache, table[block], kv_head, offset);
      for (int i = 0; i < TILE / W; i++) columns[t * (TILE / W) + i] = key + i * W;
      for (int i = 0; i < TILE / C::PAIR; i++) values[t * (TILE / C::PAIR) + i] = value + i * v_dim;
      if (!ASKS_AHEAD && count <= FEW_ROWS)
        for (int64_t line = 0; line < value_tile_bytes(cache); line += 64) ask_for((const char*)value + line);
    }
  }

  void widen_keys(int t, int block, int offset) {
    Word* to = wide + t * TILE / 2 * dim;
    C::expand((const int8_t*)key_tile(cache, block, kv_head, offset), (uint16_t*)to, TILE * dim);
    for (int i = 0; i < TILE / W; i++) columns[t * (TILE / W) + i] = to + i * W;
    const float *of_keys = key_scale(cache, block, kv_head, offset), *of_values = value_scale(cache, block, kv_head, offset);
    for (int i = 0; i < TILE; i += W) {
      store(key_scales + t * TILE + i, load(of_keys + i) * C::DROP);
      store(value_scales + t * TILE + i, load(of_values + i) * C::LIFT);
    }
  }

  // Into the place of the keys, which are done with.
  void widen_values(int base, int first_tile, int last_tile, const int32_t* table, Ahead& ahead) {
    for (int t = first_tile; t < last_tile; t++) {
      const int position = base + t * TILE, block = position / cache.block_size, offset = position % cache.block_size;
      Word* to = wide + t * TILE / 2 * v_dim;
      C::expand((const int8_t*)value_tile(cache, table[block], kv_head, offset), (uint16_t*)to, TILE * v_dim);
      for (int i = 0; i < TILE / 2; i++) values[t * (TILE / 2) + i] = to + i * v_dim;
      ahead.ask();
    }
  }

  void score(int base, int begin, int end) {
    const int groups = (count + MAX_R - 1) / MAX_R, steps = (cache.head_dim + C::PAIR - 1) / C::PAIR;
    for (int c = begin; c < end; c += MAX_N) {
      // the last block of registers reaches back into the one before: cheaper than single registers, and the same bits
      if (c + MAX_N > end && end - begin >= MAX_N) c = end - MAX_N;
      for (int g = 0; g < groups; g++) {
        const int first = g * count / groups, n = (g + 1) * count / groups - first;
        int seen_from = rows[first].low, seen_to = rows[first].high;
        for (int r = first + 1; r < first + n; r++) {
          seen_from = std::min(seen_from, rows[r].low);
          seen_to = std::max(seen_to, rows[r].high);
        }
        if (base + c * W >= seen_to || base + (c + MAX_N) * W <= seen_from) continue;
        const Left* left = q + first * dim;
        float* to = scores + first * STRIDE;
        if (c + MAX_N <= end) {
          Blocks<C, MAX_N>::score[n](left, dim, columns + c, steps, to + c * W, STRIDE);
          continue;
        }
        int i = c;
        for (; i + 2 <= end; i += 2) Blocks<C, 2>::score[n](left, dim, columns + i, steps, to + i * W, STRIDE);
        if (i < end) Blocks<C, 1>::score[n](left, dim, columns + i, steps, to + i * W, STRIDE);
      }
    }
  }

  // Scores as they are compared, those of tokens beside begin .. end in their registers -inf, and the row's peak.
  void find_peak(int r, int begin, int end) {
    split_state[r] = {-INFINITY, 0.0f};
    if (begin >= end) return;
    float* s = scores + r * STRIDE;
    const int first = begin / W, last = (end - 1) / W;
    if (IS_I8)
      for (int c = first; c <= last; c++) store(s + c * W, load(s + c * W) * load(key_scales + c * W));
    if (call.softcap > 0.0f)
      for (int c = first; c <= last; c++) store(s + c * W, capped(load(s + c * W) * call.scale));
    store(s + first * W, seen(first, begin, end, load(s + first * W), -INFINITY));
    store(s + last * W, seen(last, begin, end, load(s + last * W), -INFINITY));
    vf peaks = splat(-INFINITY);
    for (int c = first; c <= last; c++) peaks = max(peaks, load(s + c * W));
    best[r] = max_lanes(peaks);
    split_state[r].peak = best[r] * scale();
  }

  // Scores to weights; tokens beside begin .. end in their registers get weight zero.
  void weigh_scores(int r, int begin, int end) {
    if (begin >= end) return;
    const float* s = scores + r * STRIDE;
    Left* weights = p + r * STRIDE;
    const int first = begin / W, last = (end - 1) / W;
    const vf factor = splat(scale() * LOG2_E), peak = splat(best[r]);
    vf total = splat(0.0f);
    auto weigh = [&](int c) {
      const vf x = (load(s + c * W) - peak) * factor;  // exactly 0 for the best, however large
#if defined(__AVX512DQ__)
      if constexpr (sizeof(Left) == 2) return exp2_coarse(x);
#endif
      return exp2_below(x);
    };
    auto keep = [&](int c, vf x) {
      total += x;
      if (IS_I8) x = weighed(c, x);
      C::store_left(weights + c * W, x);
    };
    keep(first, seen(first, begin, end, weigh(first), 0.0f));
    for (int c = first + 1; c < last; c++) keep(c, weigh(c));
    if (last > first) keep(last, seen(last, begin, end, weigh(last), 0.0f));
    split_state[r].total = sum_lanes(total);
  }

  // Row after row in two passes, so that one row's peak is not waited for before the next row is begun.
  void softmax(int base) {
    auto from = [&](int r) { return std::max(rows[r].low - base, 0); };
    auto to = [&](int r) { return std::min(rows[r].high - base, SPLIT); };
    for (int r = 0; r < count; r++) find_peak(r, from(r), to(r));
    for (int r = 0; r < count; r++) weigh_scores(r, from(r), to(r));
  }

  static vf seen(int c, int begin, int end, vf x, float otherwise) {
    const vi token = lanes() + c * W;
    return (token >= begin) & (token < end) ? x : splat(otherwise);
  }

  // Of scores that are compared; softcap has taken it in.
  float scale() const { return call.softcap > 0.0f ? 1.0f : call.scale; }

  // Weights times the values' scales; a token of weight zero counts for nothing, whatever its scale.
  vf weighed(int c, vf x) const { return x != splat(0.0f) ? x * load(value_scales + (IS_I8 ? c * W : 0)) : splat(0.0f); }

  vf capped(vf x) const {  // softcap * tanh(x / softcap)
    const vf u = x / call.softcap, e = exp(as_float((vu)u | 0x80000000u) * 2.0f);
    const vf magnitude = call.softcap * (1.0f - e) / (1.0f + e);
    return as_float((vu)magnitude | ((vu)u & 0x80000000u));
  }

  // Weighted values of rows first .. last. Tokens that all of them see are read once for all; the ragged ends token by
  // token, so that no row ever multiplies a value it may not see (zero times a stale inf would be NaN).
  void weigh_group(int first, int last, int base) {
    int begin = 0, end = SPLIT;
    for (int r = first; r < last; r++) {
      begin = std::max(begin, rows[r].low - base);
      end = std::min(end, rows[r].high - base);
    }
    begin = (begin + C::PAIR - 1) / C::PAIR * C::PAIR;
    end = end / C::PAIR * C::PAIR;
    if (end <= begin) begin = end = SPLIT;  // nothing in common
    for (int r = first, next; r < last; r = next) {
      for (next = r + 1; next < last && rows[next].token == rows[r].token;) next++;
      weigh(r, next, std::max(rows[r].low - base, 0), std::min({rows[r].high - base, begin, SPLIT}));
    }
    if (end > begin) weigh(first, last, begin, end);
    for (int r = first, next; r < last && end < SPLIT; r = next) {
      for (next = r + 1; next < last && rows[next].token == rows[r].token;) next++;
      weigh(r, next, end, std::min(rows[r].high - base, SPLIT));
    }
  }

  void weigh(int first, int last, int begin, int end) {
    if (begin >= end) return;
    const int from = begin / C::PAIR, to = (end + C::PAIR - 1) / C::PAIR;
    const Word *head = values[from], *tail = values[to - 1];
    if (begin % C::PAIR) mask(from, 0, false, from < to - 1 || end % C::PAIR == 0);
    if (end % C::PAIR) mask(to - 1, 1, true, false);
    const int n = last - first;
    const Left* left = p + first * STRIDE;
    float* into = split_out + first * v_dim;
    for (int column = 0; column < v_dim;) {
      const int registers = (int)(v_dim - column) / W;
      if (registers >= MAX_N) {
        Blocks<C, MAX_N>::value[n](left, STRIDE, values, from, to, column, into, v_dim);
        column += MAX_N * W;
      } else if (registers >= 2) {
        Blocks<C, 2>::value[n](left, STRIDE, values, from, to, column, into, v_dim);
        column += 2 * W;
      } else {
        Blocks<C, 1>::value[n](left, STRIDE, values, from, to, column, into, v_dim);
        column += W;
      }
    }
    values[from] = head;
    values[to - 1] = tail;
  }

  void mask(int step, int buffer, bool keep_first, bool keep_second) {
    Word* copy = masked + buffer * v_dim;
    memmove(copy, values[step], v_dim * sizeof(Word));
    C::mask(copy, (int)v_dim, keep_first, keep_second);
    values[step] = copy;
  }
};

}  // namespace bi
