#include "gemm.h"

#include <algorithm>

#include "activation.h"
#include "team.h"
#include "tiles.h"

#if BI_TILES
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define BI_DOTS 1
#endif

namespace bi {

// Rows that stay in a core's cache while all weights pass them.
constexpr int64_t CACHED_BYTES = 768 * 1024;
constexpr int64_t CLAIMED = 4;  // strips that a thread takes at once

constexpr int64_t LINE = 64, LINES = TILE_BYTES / LINE;  // of a cache, and in a tile

struct Block {
  const char* rows;
  int64_t row_bytes;
  const char* left;  // weights of 16 columns, and of the next 16
  const char* right;
  int64_t num_tiles;  // along the summed index
  char* out;
  int64_t out_bytes;     // from row to row
  const int32_t* start;  // what the columns' sums begin with; null: zeros
  const char* next_left;  // weights of the strip after this, of which the block asks for some lines of each tile
  const char* next_right;
  int next_lines;
};

#if BI_TILES
constexpr int MAX_M = 32;  // rows of a block

// A palette for each number of rows: tiles 0-3 hold sums, 4 and 5 rows, 6 and 7 weights.
struct Palettes {
  Palette of[MAX_M + 1];
  constexpr Palettes() : of() {
    for (int m = 1; m <= MAX_M; m++) {
      const int upper = m < 16 ? m : 16, lower = m > 16 ? m - 16 : 1;
      const int rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
      for (int t = 0; t < 8; t++) {
        of[m].bytes[t] = 64;
        of[m].rows[t] = (uint8_t)rows[t];
      }
    }
  }
};
static constexpr Palettes PALETTES;

template <bool INT8, bool TWO>
static inline __attribute__((always_inline)) void multiply_tiles(const Block& b) {
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const char *rows = b.rows, *lower = rows + 16 * b.row_bytes;
  for (int64_t i = 0; i < b.num_tiles; i++) {
    for (int line = 0; line < b.next_lines; line++) {
      ask_for(b.next_left + i * TILE_BYTES + line * LINE);
      ask_for(b.next_right + i * TILE_BYTES + line * LINE);
    }
    _tile_loadd(6, b.left + i * TILE_BYTES, 64);
    _tile_loadd(4, rows + i * KEPT_BYTES, b.row_bytes);
    if (INT8) _tile_dpbssd(0, 4, 6);
    else _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b.right + i * TILE_BYTES, 64);
    if (INT8) _tile_dpbssd(1, 4, 7);
    else _tile_dpbf16ps(1, 4, 7);
    if (!TWO) continue;
    _tile_loadd(5, lower + i * KEPT_BYTES, b.row_bytes);
    if (INT8) {
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    } else {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, b.out, b.out_bytes);
  _tile_stored(1, b.out + 64, b.out_bytes);
  if (!TWO) return;
  _tile_stored(2, b.out + 16 * b.out_bytes, b.out_bytes);
  _tile_stored(3, b.out + 16 * b.out_bytes + 64, b.out_bytes);
}

template <bool INT8>
static void multiply_block(const Block& b, int m) {
  if (m > 16) multiply_tiles<INT8, true>(b);
  else multiply_tiles<INT8, false>(b);
}

static inline void begin_rows(int m) { _tile_loadconfig(&PALETTES.of[m]); }

#elif BI_DOTS
constexpr int MAX_M = 12;  // times two registers of columns: 24 of 32 registers hold sums

template <bool INT8, int R>
static void multiply_dots(const Block& b) {
  __m512i sum[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    sum[r][0] = b.start ? _mm512_loadu_si512(b.start) : _mm512_setzero_si512();
    sum[r][1] = b.start ? _mm512_loadu_si512(b.start + TILE_N) : _mm512_setzero_si512();
  }
  auto add = [](__m512i total, __m512i x, __m512i w) __attribute__((always_inline)) {
    return INT8 ? _mm512_dpbusd_epi32(total, x, w)
                : (__m512i)_mm512_dpbf16_ps((__m512)total, (__m512bh)x, (__m512bh)w);
  };
  for (int64_t word = 0; word < b.num_tiles * (KEPT_BYTES / 4); word++) {
    const __m512i left = _mm512_loadu_si512(b.left + word * 64), right = _mm512_loadu_si512(b.right + word * 64);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      int32_t numbers;
      memcpy(&numbers, b.rows + r * b.row_bytes + word * 4, 4);
      const __m512i x = _mm512_set1_epi32(numbers);
      sum[r][0] = add(sum[r][0], x, left);
      sum[r][1] = add(sum[r][1], x, right);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    _mm512_storeu_si512(b.out + r * b.out_bytes, sum[r][0]);
    _mm512_storeu_si512(b.out + r * b.out_bytes + 64, sum[r][1]);
  }
}

template <bool INT8>
static void multiply_block(const Block& b, int m) {
  typedef void (*Dots)(const Block&);
  static constexpr Dots DOTS[] = {nullptr,
                                  multiply_dots<INT8, 1>,
                                  multiply_dots<INT8, 2>,
                                  multiply_dots<INT8, 3>,
                                  multiply_dots<INT8, 4>,
                                  multiply_dots<INT8, 5>,
                                  multiply_dots<INT8, 6>,
                                  multiply_dots<INT8, 7>,
                                  multiply_dots<INT8, 8>,
                                  multiply_dots<INT8, 9>,
                                  multiply_dots<INT8, 10>,
                                  multiply_dots<INT8, 11>,
                                  multiply_dots<INT8, 12>};
  DOTS[m](b);
}

static inline void begin_rows(int) {}

// The instruction multiplies unsigned numbers with signed ones, so rows get 128 added; a column's sum then begins with
// what that adds to it, taken away.
static void start_of(const char* weights, int64_t num_tiles, int32_t* start) {
  __m512i sum = _mm512_setzero_si512();
  const __m512i offset = _mm512_set1_epi8((char)128);
  for (int64_t word = 0; word < num_tiles * (KEPT_BYTES / 4); word++)
    sum = _mm512_dpbusd_epi32(sum, offset, _mm512_loadu_si512(weights + word * 64));
  _mm512_storeu_si512(start, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
}

static const void* with_offset(const void* rows, int64_t bytes) {
  char* to = (char*)scratch(bytes / sizeof(float));
  for (int64_t i = 0; i < bytes; i += 64)
    _mm512_storeu_si512(to + i, _mm512_xor_si512(_mm512_loadu_si512((const char*)rows + i), _mm512_set1_epi8((char)128)));
  return to;
}

#else
constexpr int MAX_M = 32;

template <bool INT8>
static void multiply_block(const Block& b, int m) {
  constexpr int P = INT8 ? 4 : 2;
  for (int r = 0; r < m; r++)
    for (int half = 0; half < 2; half++) {
      const char *row = b.rows + r * b.row_bytes, *weights = half ? b.right : b.left;
      int32_t sum[TILE_N] = {};
      float total[TILE_N] = {};
      for (int64_t word = 0; word < b.num_tiles * (KEPT_BYTES / 4); word++)
        for (int c = 0; c < TILE_N; c++)
          for (int p = 0; p < P; p++) {
            const int64_t at = (word * TILE_N + c) * P + p;
            if (INT8)
              sum[c] += (int32_t)((const int8_t*)row)[word * P + p] * ((const int8_t*)weights)[at];
            else
              total[c] += from_bf16(((const uint16_t*)row)[word * P + p]) * from_bf16(((const uint16_t*)weights)[at]);
          }
      memcpy(b.out + r * b.out_bytes + half * 64, INT8 ? (const void*)sum : (const void*)total, 64);
    }
}

static inline void begin_rows(int) {}
#endif

// Rows times two times 16 columns: out is left to `then` block after block, which is told the block's first row and its
// number of rows.
template <bool INT8, class Then>
static void multiply_strip(const char* rows, int64_t num_rows, const Packed& w, int64_t left_tile, int64_t right_tile,
                           char* out, int64_t out_bytes, int64_t block_step, Then then) {
  const int64_t bytes = row_bytes(w), num_tiles = bytes / KEPT_BYTES;
  const char* left = (const char*)w.data + left_tile * num_tiles * TILE_BYTES;
  const char* right = (const char*)w.data + right_tile * num_tiles * TILE_BYTES;
  const int32_t* start = nullptr;
#if BI_DOTS
  int32_t starts[PAIR_N];
  if (INT8) {
    start_of(left, num_tiles, starts);
    start_of(right, num_tiles, starts + TILE_N);
    start = starts;
  }
#endif
  // Weights come from far while many rows are multiplied, so blocks ask for those of the next strip, each for a part.
  const int64_t num_blocks = (num_rows + MAX_M - 1) / MAX_M, lines = (LINES + num_blocks - 1) / num_blocks;
  const int64_t strip_bytes = (right_tile - left_tile == 1 ? 2 : 1) * num_tiles * TILE_BYTES;
  for (int64_t m = 0, first = 0; m < num_rows; first += lines) {
    const int n = (int)std::min<int64_t>(MAX_M, num_rows - m);
    if (m == 0 || n < MAX_M) begin_rows(n);
    const int64_t next = strip_bytes + first * LINE;
    multiply_block<INT8>({rows + m * bytes, bytes, left, right, num_tiles, out + m * block_step, out_bytes, start,
                          left + next, right + next, (int)std::max<int64_t>(0, std::min(lines, LINES - first))},
                         n);
    then(m, n);
    m += n;
  }
}

template <bool INT8>
static void multiply_pair(const char* rows, int64_t num_rows, const Packed& w, int64_t pair, char* out) {
  const int64_t out_bytes = padded_columns(w) * 4;
  multiply_strip<INT8>(rows, num_rows, w, 2 * pair, 2 * pair + 1, out + pair * PAIR_N * 4, out_bytes, out_bytes,
                       [](int64_t, int) {});
}

// A block of a strip's product, which is still in the nearest cache; numbers of its rows and columns.
template <bool INT8>
static Source block_of(const char* block, int64_t row, int64_t in_block, int64_t column, const Scales& scales) {
  return {block + in_block * 4,
          PAIR_N,
          scales.row ? scales.row + row : nullptr,
          scales.column ? scales.column + column : nullptr,
          scales.bias ? scales.bias + column : nullptr,
          INT8 ? I32 : F32};
}

// 16 columns of gates beside the 16 that they multiply.
template <bool INT8>
static void multiply_gates(const char* rows, int64_t num_rows, const Packed& w, int64_t tile, const Scales& scales,
                           int32_t activation, float* out) {
  const int64_t n = w.n / 2, gate_at = tile * TILE_N, up_at = n + gate_at;
  alignas(64) char block[MAX_M * PAIR_N * 4];
  multiply_strip<INT8>(rows, num_rows, w, tile, tile + n / TILE_N, block, PAIR_N * 4, 0, [&](int64_t m, int count) {
    const Source gate = block_of<INT8>(block, m, 0, gate_at, scales), up = block_of<INT8>(block, m, TILE_N, up_at, scales);
    for (int r = 0; r < count; r++)
      for (int i = 0; i < TILE_N; i += W)
        store(out + (m + r) * n + gate_at + i, activate(activation, load_numbers(gate, r, i)) * load_numbers(up, r, i));
  });
}

static void take(float x, int64_t column, Largest& largest) {
  largest.has_nan |= x != x;
  if (x > largest.value) {
    largest.value = x;
    largest.column = column;
  }
}

template <bool INT8>
static void multiply_pair_largest(const char* rows, int64_t num_rows, const Packed& w, int64_t pair, const Scales& scales,
                                  float factor, int64_t first_column, Largest* mine) {
  const int64_t first = pair * PAIR_N;
  const int n = (int)std::min<int64_t>(PAIR_N, w.n - first);
  alignas(64) char block[MAX_M * PAIR_N * 4];
  multiply_strip<INT8>(rows, num_rows, w, 2 * pair, 2 * pair + 1, block, PAIR_N * 4, 0, [&](int64_t m, int count) {
    const Source in = block_of<INT8>(block, m, 0, first, scales);
    for (int r = 0; r < count; r++) {
      Largest& largest = mine[m + r];
      float x[PAIR_N];
      vi is_new = {};
      if (n == PAIR_N) {
        for (int i = 0; i < PAIR_N; i += W) {
          const vf numbers = load_numbers(in, r, i) * factor;
          store(x + i, numbers);
          is_new |= ~(numbers <= splat(largest.value));  // NaN too
        }
        if (!any(is_new)) continue;
      } else {
        load_row(in, r, 0, n, x);
        for (int i = 0; i < n; i++) x[i] *= factor;
      }
      for (int i = 0; i < n; i++) take(x[i], first_column + first + i, largest);
    }
  });
}

// What threads share: strips of columns, each with so many rows as stay in a core's cache meanwhile.
template <class Strip>
static void each_strip(const void* rows, int64_t num_rows, const Packed& w, int64_t num_strips, bool alone, Strip strip) {
  const int64_t bytes = row_bytes(w), cached = std::max<int64_t>(2, CACHED_BYTES / bytes / MAX_M) * MAX_M;
  const int64_t count = (num_rows + cached - 1) / cached * num_strips;
#if BI_DOTS
  if (w.kind == I8) rows = with_offset(rows, num_rows * bytes);
#endif
  auto run = [&](int64_t i) {
    const int64_t first = i / num_strips * cached;
    strip((const char*)rows + first * bytes, first, std::min(cached, num_rows - first), i % num_strips);
  };
  if (alone) {
    for (int64_t i = 0; i < count; i++) run(i);
    return;
  }
  for (int64_t i; (i = Team::claim() * CLAIMED) < count;)
    for (int64_t j = i; j < std::min(i + CLAIMED, count); j++) run(j);
  Team::wait();
}

void multiply(const void* rows, int64_t num_rows, const Packed& w, void* out, bool alone) {
  each_strip(rows, num_rows, w, padded_columns(w) / PAIR_N, alone,
             [&](const char* from, int64_t first, int64_t count, int64_t pair) {
               char* to = (char*)out + first * padded_columns(w) * 4;
               if (w.kind == I8) multiply_pair<true>(from, count, w, pair, to);
               else multiply_pair<false>(from, count, w, pair, to);
             });
}

// Of the rows from `first` on.
static Scales from_row(const Scales& scales, int64_t first) {
  return {scales.row ? scales.row + first : nullptr, scales.column, scales.bias};
}

void multiply_gated(const void* rows, int64_t num_rows, const Packed& w, const Scales& scales, int32_t activation,
                    float* out, bool alone) {
  each_strip(rows, num_rows, w, w.n / 2 / TILE_N, alone,
             [&](const char* from, int64_t first, int64_t count, int64_t tile) {
               const Scales of = from_row(scales, first);
               float* to = out + first * (w.n / 2);
               if (w.kind == I8) multiply_gates<true>(from, count, w, tile, of, activation, to);
               else multiply_gates<false>(from, count, w, tile, of, activation, to);
             });
}

void multiply_largest(const void* rows, int64_t num_rows, const Packed& w, const Scales& scales, float factor,
                      int64_t first_column, Largest* mine) {
  each_strip(rows, num_rows, w, padded_columns(w) / PAIR_N, false,
             [&](const char* from, int64_t first, int64_t count, int64_t pair) {
               const Scales of = from_row(scales, first);
               Largest* to = mine + first;
               if (w.kind == I8) multiply_pair_largest<true>(from, count, w, pair, of, factor, first_column, to);
               else multiply_pair_largest<false>(from, count, w, pair, of, factor, first_column, to);
             });
}

}  // namespace bi

using namespace bi;

// Whether this process may use what the kernels of `multiply` are made of; asks the system for it.
BI_EXPORT int32_t bi_gemm_prepare() {
#if BI_TILES
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return 1;
#endif
}

BI_EXPORT void bi_gemm(const void* rows, int64_t num_rows, const Packed* weights, void* out, int threads) {
  if (num_rows) Team::run(threads, [&] { multiply(rows, num_rows, *weights, out, false); });
}
