// The edge between ONNX Runtime and the kernel: attributes and tensors in, a checked Problem out.
#pragma once

#include <stdexcept>
#include <vector>

#include "ort.h"
#include "problem.h"

namespace sharp::ort {

// What a node or a caller got wrong, in one sentence; becomes an OrtStatus.
class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum Input {
  kQuery,
  kKey,
  kValue,
  kKeyCache,
  kValueCache,
  kSlotMapping,
  kBlockTable,
  kQueryStart,
  kContextLens,
  kHeadParams,
  kAlibiSlopes,
  kCollectStats,
  kInputCount
};
enum Output { kOutput, kKeyCacheOut, kValueCacheOut, kStats, kOutputCount };

extern const char* const kInputNames[kInputCount];

// A node's attributes; owns the coefficients that `values` points at.
struct NodeAttributes {
  cpu::Attributes values;
  std::vector<float> temperature_coefficients;
};

// Throws InputError.
void read_attributes(const Ort::ConstKernelInfo& info, NodeAttributes& attributes);

// Checks every input against every other and fills all of the problem but the caches, `output` and `stats`, which are
// outputs. Throws InputError.
cpu::Problem read_inputs(const Ort::KernelContext& context, const cpu::Attributes& attributes);

// Whether collect_stats is given and true.
bool collects_stats(const Ort::KernelContext& context);

}  // namespace sharp::ort
