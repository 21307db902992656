// Attention as a step asks for it, for a team of threads that share the work.
#pragma once
#include "attention_plan.h"
#include "layout.h"
#include "team.h"

namespace bi {

struct Attention {  // one call; mirrored in library.py
  const void* query;  // [tokens, num_q_heads, head_dim]; query_stride numbers from token to token
  void* out;          // [tokens, num_q_heads, v_head_dim]
  const float* sinks;  // [num_q_heads], null without
  float* workspace;    // [num_partials, num_q_heads, padded v_head_dim + 16]
  int64_t query_stride;
  int32_t query_kind;
  int32_t out_kind;
  int32_t num_q_heads;
  int32_t window;  // a query sees this many tokens, itself included; 0: all
  float scale;
  float softcap;  // 0: none
};

void attention(const Plan& plan, const Cache& cache, const Attention& call);

}  // namespace bi
