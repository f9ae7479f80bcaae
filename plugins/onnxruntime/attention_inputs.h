// The edge between ONNX Runtime and the contiguous kernel: tensors in, a checked problem out.
#pragma once

#include "contiguous_attention.h"
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
  cpu::ContiguousProblem problem;  // all but `output`, `stats` and the numbers below, which may have to be converted
  const void *query, *key, *value;
  const void *past_key, *past_value;  // null where there is no past
  bool shared_buffer;                 // past_lens is given: the present is the buffer of the past
  bool collect_stats;

  // Places of a sequence in the past, and in the present.
  int64_t capacity() const { return problem.keys.capacity; }
  int64_t places() const { return shared_buffer ? capacity() : capacity() + problem.keys.new_keys; }
};

// Checks every input against every other. Throws InputError.
Inputs read_attention_inputs(const Ort::KernelContext& context, const cpu::Attributes& attributes);

}  // namespace sharp::ort::attention
