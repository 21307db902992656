#include "gemm.h"

#include <algorithm>

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

struct Block {
  const char* rows;
  int64_t row_bytes;
  const char* left;  // weights of 16 columns, and of the next 16
  const char* right;
  int64_t num_tiles;  // along the summed index
  char* out;
  int64_t out_bytes;     // from row to row
  const int32_t* start;  // what the columns' sums begin with; null: zeros
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

// A run of rows times the columns of one pair of tiles.
template <bool INT8>
static void multiply_pair(const char* rows, int64_t num_rows, const Packed& w, int64_t pair, char* out) {
  const int64_t bytes = row_bytes(w), out_bytes = padded_columns(w) * 4, num_tiles = bytes / KEPT_BYTES;
  const char* left = (const char*)w.data + pair * 2 * num_tiles * TILE_BYTES;
  const int32_t* start = nullptr;
#if BI_DOTS
  int32_t starts[PAIR_N];
  if (INT8) {
    start_of(left, num_tiles, starts);
    start_of(left + num_tiles * TILE_BYTES, num_tiles, starts + TILE_N);
    start = starts;
  }
#endif
  for (int64_t m = 0; m < num_rows;) {
    const int n = (int)std::min<int64_t>(MAX_M, num_rows - m);
    if (m == 0 || n < MAX_M) begin_rows(n);
    multiply_block<INT8>({rows + m * bytes, bytes, left, left + num_tiles * TILE_BYTES, num_tiles,
                          out + m * out_bytes + pair * PAIR_N * 4, out_bytes, start},
                         n);
    m += n;
  }
}

void multiply(const void* rows, int64_t num_rows, const Packed& w, void* out) {
  const int64_t bytes = row_bytes(w), num_pairs = padded_columns(w) / PAIR_N;
  const int64_t cached = std::max<int64_t>(2, CACHED_BYTES / bytes / MAX_M) * MAX_M;
  const int64_t num_chunks = (num_rows + cached - 1) / cached;
#if BI_DOTS
  if (w.kind == I8) rows = with_offset(rows, num_rows * bytes);
#endif
#pragma omp for schedule(dynamic, 4) nowait
  for (int64_t i = 0; i < num_chunks * num_pairs; i++) {
    const int64_t first = i / num_pairs * cached, n = std::min(cached, num_rows - first);
    const char* from = (const char*)rows + first * bytes;
    char* to = (char*)out + first * padded_columns(w) * 4;
    if (w.kind == I8) multiply_pair<true>(from, n, w, i % num_pairs, to);
    else multiply_pair<false>(from, n, w, i % num_pairs, to);
  }
  Team::wait();
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
#pragma omp parallel num_threads(threads) if (num_rows)
  multiply(rows, num_rows, *weights, out);
}
