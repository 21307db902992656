// The tile registers of AMX: eight of up to 16 rows of 64 bytes, whose shapes are configured together.
#pragma once
#include <cstdint>

#include "simd.h"

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define BI_TILES 1
#else
#define BI_TILES 0
#endif

// CPUs with tiles have arithmetic of float16 too; compilers learnt it later.
#if BI_TILES && (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 12)
#define BI_FLOAT16 1
#else
#define BI_FLOAT16 0
#endif

namespace bi {

#if BI_TILES
// What a configuration is read from. Always a constant: compilers do not know that loading one reads memory, and drop
// the stores of a local one.
struct alignas(64) Palette {
  uint8_t id = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};
#endif

}  // namespace bi
