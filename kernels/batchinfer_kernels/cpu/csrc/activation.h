// What a gate is put through before it multiplies.
#pragma once
#include "simd.h"

namespace bi {

static inline vf silu(vf x) { return x / (1.0f + exp(-x)); }
static inline vf gelu_tanh(vf x) {  // 0.5 x (1 + tanh(u)) = x / (1 + e^-2u)
  return x / (1.0f + exp(-1.5957691216f * (x + 0.044715f * x * x * x)));
}

// 0 is silu, 1 gelu (tanh)
static inline vf activate(int32_t activation, vf x) { return activation == 0 ? silu(x) : gelu_tanh(x); }

}  // namespace bi
