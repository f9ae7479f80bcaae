// One call of PagedAttention as plain data: shapes, buffers and attributes, checked before they come here.
#pragma once

#include <cstdint>

namespace sharp::cpu {

enum class NormalizerKind { kSoftmax, kSsa, kAdaptiveSoftmax, kEntmax, kSigmoid, kRelu, kRelu2, kSoftpick };

// Columns of head_params that a normalizer has of its own.
[[gnu::always_inline]] constexpr int64_t own_parameters(NormalizerKind kind) {
  switch (kind) {
    case NormalizerKind::kSsa:      // b, n
    case NormalizerKind::kSigmoid:  // bias, power
      return 2;
    case NormalizerKind::kRelu:  // power
    case NormalizerKind::kRelu2:
      return 1;
    default:
      return 0;
  }
}

// Whether a sink may compete with its keys: a weight of one logit alone knows no competition. Those without need no
// parameters of their own either.
[[gnu::always_inline]] constexpr bool takes_sinks(NormalizerKind kind) {
  return kind != NormalizerKind::kSigmoid && kind != NormalizerKind::kRelu && kind != NormalizerKind::kRelu2;
}

enum class CacheType { kFloat32, kFloat16, kBfloat16, kInt8, kFloat8 };

// Whether the cache's numbers stand for themselves times their block's scale.
[[gnu::always_inline]] constexpr bool has_scales(CacheType type) {
  return type == CacheType::kInt8 || type == CacheType::kFloat8;
}

[[gnu::always_inline]] inline int64_t bytes_of(CacheType type) {
  return type == CacheType::kFloat32 ? 4 : has_scales(type) ? 1 : 2;
}

struct Attributes {
  NormalizerKind normalizer = NormalizerKind::kSoftmax;
  float scale = 1.0f;
  float alpha = 1.5f;                               // entmax
  const float* temperature_coefficients = nullptr;  // adaptive_softmax, highest power first
  int64_t temperature_terms = 0;
  float entropy_threshold = 0.5f;  // nats
  float softcap = 0.0f;            // 0 = off
  int64_t window = -1;             // -1 = off
  bool causal = true;
  int64_t stats_columns = 4;  // 5: the sink's mass too
  float key_bound = 0.0f;     // no key that a head with a slope sees is longer; 0 = not known
};

struct Problem {
  int64_t tokens, q_heads, kv_heads, head_dim, value_dim;
  int64_t blocks, block_size, sequences, max_blocks;
  const float* query;  // [tokens, q_heads, head_dim]
  const float* key;    // [tokens, kv_heads, head_dim]
  const float* value;  // [tokens, kv_heads, value_dim]
  void* key_cache;     // cache_type [blocks, kv_heads, head_dim, block_size]
  void* value_cache;   // cache_type [blocks, kv_heads, block_size, value_dim]
  CacheType cache_type;
  float* key_scale;             // [blocks, kv_heads], of int8 and fp8: a key is scale * number
  float* value_scale;           // [blocks, kv_heads], of int8 and fp8
  int8_t* key_screen;           // [blocks, kv_heads, screen_bytes()] or null; see screen.h
  const float* key_shift;       // [kv_heads, head_dim], what the screen has taken off the keys; or null: nothing
  const int32_t* slot_mapping;  // [tokens]
  const int32_t* block_table;   // [sequences, max_blocks]
  const int32_t* query_start;   // [sequences + 1]
  const int32_t* context_lens;  // [sequences]
  const int32_t* total_lens;    // [sequences] keys of a sequence that count, or null: context and new tokens
  const float* head_params;     // [q_heads, head_params_width] or null
  int64_t head_params_width;
  const float* sinks;         // the column of head_params with the sinks, or null; -inf is none
  const float* alibi_slopes;  // [q_heads] or null
  float* output;              // [tokens, q_heads, value_dim]
  float* stats;               // [tokens, q_heads, stats_columns], null when not collected
  const int64_t* reach;       // [tokens, q_heads] or null: keys further back than this surely have weight 0
  Attributes attributes;

  [[gnu::always_inline]] int64_t group() const { return q_heads / kv_heads; }
  // A logit that competes with those of the keys and has no value; -inf is none.
  [[gnu::always_inline]] float sink(int64_t head) const {
    return sinks == nullptr ? -__builtin_inff() : sinks[head * head_params_width];
  }
  [[gnu::always_inline]] int64_t total(int64_t sequence) const {
    if (total_lens != nullptr) return total_lens[sequence];
    return int64_t{context_lens[sequence]} + query_start[sequence + 1] - query_start[sequence];
  }
};

}  // namespace sharp::cpu
