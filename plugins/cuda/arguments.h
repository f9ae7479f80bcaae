// The values of kernel parameters, by name.
#pragma once

#include <cstdint>

#include "sharp_op.h"

namespace sharp::cuda {

// All parameters of all kernels; the list of one kernel is in its image.
// clang-format off
#define SHARP_ARGUMENTS(X) \
  X(query) X(key) X(value) X(key_cache) X(value_cache) X(slot_mapping) X(block_table) X(query_start) X(context_lens) \
  X(key_scale) X(value_scale) X(key_screen) X(key_shift) X(past_lens) X(total_lens) X(head_params) X(alibi_slopes) X(collect_stats) X(output) X(stats) X(plan) X(sums) X(outputs) X(logits) X(solution) X(tiles) \
  X(indices) X(samplings) X(starts) X(changes) X(candidates) X(sampled) X(vocab) \
  X(tokens) X(sequences) X(q_heads) X(kv_heads) X(max_blocks) X(slots) X(most_tokens) X(units) X(workers) X(items) X(parts) X(stage) X(parameters) X(shifted) \
  X(new_keys) X(past) X(counted) X(stored) X(columns) \
  SHARP_ATTRIBUTE_ARGUMENTS(X) X(t0) X(t1) X(t2) X(t3) X(t4) X(t5) X(t6) X(t7)
// clang-format on

enum class Argument {
#define SHARP_ENUMERATOR(name) name,
  SHARP_ARGUMENTS(SHARP_ENUMERATOR)
#undef SHARP_ENUMERATOR
};

constexpr const char* kArgumentNames[] = {
#define SHARP_STRING(name) #name,
    SHARP_ARGUMENTS(SHARP_STRING)
#undef SHARP_STRING
};
constexpr int kArgumentCount = sizeof(kArgumentNames) / sizeof(kArgumentNames[0]);

// The arguments of a launch; a kernel gets the ones that it has parameters for. Arguments that were not set are 0.
class Arguments {
 public:
  void set(Argument argument, const void* pointer) { at(argument).pointer = pointer; }
  void set(Argument argument, int64_t integer) { at(argument).integer = integer; }
  void set(Argument argument, float number) { at(argument).number = number; }

  union Value {
    const void* pointer;
    int64_t integer;
    float number;
  };
  const Value& get(int argument) const { return values_[argument]; }

 private:
  Value& at(Argument argument) { return values_[static_cast<int>(argument)]; }

  Value values_[kArgumentCount] = {};
};

}  // namespace sharp::cuda
