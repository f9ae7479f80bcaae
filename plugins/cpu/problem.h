// One call of PagedAttention on the CPU, already checked: float32 query, key, value and output, all buffers on the
// host.
#pragma once

#include <cstdint>

#include "call_sizes.h"

namespace sharp::cpu {

struct Problem : SharpPagedAttention {
  const int32_t* total_lens;  // [sequences] keys of each sequence that count; null: context and new tokens
  const float* sinks;         // the column of head_params with the sinks, or null; -inf means no sink
  const int64_t* reach;       // [tokens, q_heads] or null: keys further back than this surely have weight 0

  [[gnu::always_inline]] const float* query_rows() const { return static_cast<const float*>(query); }
  [[gnu::always_inline]] const float* key_rows() const { return static_cast<const float*>(key); }
  [[gnu::always_inline]] const float* value_rows() const { return static_cast<const float*>(value); }
  [[gnu::always_inline]] float* output_rows() const { return static_cast<float*>(output); }
  [[gnu::always_inline]] int64_t group() const { return q_heads / kv_heads; }
  // Returns a head's sink: a logit that competes with the keys' logits and has no value; -inf means no sink.
  [[gnu::always_inline]] float sink(int64_t head) const {
    return sinks == nullptr ? -__builtin_inff() : sinks[head * parameters];
  }
  [[gnu::always_inline]] int64_t total(int64_t sequence) const {
    if (total_lens != nullptr) return total_lens[sequence];
    return int64_t{context_lens[sequence]} + query_start[sequence + 1] - query_start[sequence];
  }
};

}  // namespace sharp::cpu
