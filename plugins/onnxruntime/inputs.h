// The boundary between ONNX Runtime and the kernel: attributes and tensors in, a checked Problem out.
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
  kKeyScale,
  kValueScale,
  kKeyScreen,
  kKeyShift,
  kInputCount
};
enum Output {
  kOutput,
  kKeyCacheOut,
  kValueCacheOut,
  kStats,
  kKeyScaleOut,
  kValueScaleOut,
  kKeyScreenOut,
  kOutputCount
};

extern const char* const kInputNames[kInputCount];

// A node's attributes; owns the coefficients that `values` points at.
struct NodeAttributes {
  cpu::Attributes values;
  std::vector<float> temperature_coefficients;
};

// Throws InputError.
void read_attributes(const Ort::ConstKernelInfo& info, NodeAttributes& attributes);

// Whether an input is given: of those that may be left out, an empty one is not.
bool is_given(const Ort::KernelContext& context, Input input);

// Checks the shape of every input against every other and fills all of the problem but the caches, their scales and
// screen, `output` and `stats`, which are outputs, and query, key and value, which may have to be converted. Throws
// InputError.
cpu::Problem read_shapes(const Ort::KernelContext& context, const cpu::Attributes& attributes,
                         cpu::CacheType cache_type);

// As read_shapes, for inputs on the host: their numbers are checked too.
cpu::Problem read_inputs(const Ort::KernelContext& context, const cpu::Attributes& attributes,
                         cpu::CacheType cache_type);

// Whether collect_stats is given and true.
bool collects_stats(const Ort::KernelContext& context);

}  // namespace sharp::ort
