// Sizes computed from a call. The functions are always inlined, because kernels are compiled for several instruction
// sets, which must not share one copy of a function.
#pragma once

#include "sharp_op.h"

namespace sharp {

// Whether a cache of the type has scales.
[[gnu::always_inline]] constexpr bool has_scales(SharpType type) { return type == SHARP_INT8 || type == SHARP_FP8; }

// Returns the bytes of a number of the type.
[[gnu::always_inline]] constexpr int64_t bytes_of(SharpType type) {
  return type == SHARP_FLOAT32 ? 4 : has_scales(type) ? 1 : 2;
}

// Returns the bytes of the key screen of a block and head.
[[gnu::always_inline]] constexpr int64_t screen_bytes(int64_t head_dim, int64_t block_size) {
  return block_size * ((head_dim + 3) / 4 * 4 + 8);
}

// Returns the slots of a sequence in the present: the buffer's, or those of the past plus one per new key.
[[gnu::always_inline]] inline int64_t slots_of(const SharpAttention& call) {
  return call.shared ? call.capacity : call.capacity + call.new_keys;
}

// Returns a pointer to the sink of head 0 in head_params, or null without sinks. The sink of head h is h * parameters
// further on.
template <typename Call>
[[gnu::always_inline]] inline const float* sinks_of(const Call& call) {
  const int64_t own = kNormalizers[call.attributes.normalizer].columns;
  return call.head_params == nullptr || call.parameters <= own ? nullptr : call.head_params + own;
}

}  // namespace sharp
