// The boundary between ONNX Runtime and the contiguous kernel: tensors in, a checked problem out.
#pragma once

#include "contiguous_attention.h"
#include "element_types.h"
#include "inputs.h"

// A namespace of its own: PagedAttention has inputs of the same names.
namespace sharp::ort::attention {

enum Input {
  kQuery,
  kKey,
  kValue,
  kPastKey,
  kPastValue,
  kPastLens,
  kTotalLens,
  kHeadParams,
  kAlibiSlopes,
  kCollectStats,
  kInputCount
};
enum Output { kOutput, kPresentKey, kPresentValue, kStats, kOutputCount };

struct Inputs {
  // All but query, keys, values, `output` and `stats`, which may have to be converted; past and total are numbers.
  cpu::ContiguousProblem problem;
  const void *query, *key, *value;
  const void *past_key, *past_value;      // null where there is no past, and maybe where it has no slots
  const int32_t *past_lens, *total_lens;  // [batch] or null
  const bool* collect_stats;              // or null: false

  bool shared_buffer() const { return past_lens != nullptr; }  // the present is the buffer of the past

  // Places of a sequence in the past, and in the present.
  int64_t capacity() const { return problem.keys.capacity; }
  int64_t slots() const { return shared_buffer() ? capacity() : capacity() + problem.keys.new_keys; }
};

// Checks the type of the past and the shape of every input against every other, and fills all but problem.past and
// problem.total. Throws InputError.
Inputs read_attention_shapes(const Ort::KernelContext& context, const cpu::Attributes& attributes, ElementTypes types);

// As read_attention_shapes, for inputs on the host: their numbers are checked too, and nothing is left out.
Inputs read_attention_inputs(const Ort::KernelContext& context, const cpu::Attributes& attributes, ElementTypes types);

}  // namespace sharp::ort::attention
