// A stand-in for ONNX Runtime: as much of its C API as the ops call, over tensors in memory of exactly their size.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "ort.h"

namespace sharp::fuzz {

using Type = ONNXTensorElementDataType;
using Shape = std::vector<int64_t>;

int64_t bytes_of(Type type);

// The number of elements; -1 where ONNX Runtime would not make such a tensor.
int64_t elements_of(const Shape& shape);

struct Tensor {
  Type type;
  Shape shape;
  std::unique_ptr<char[]> memory;
  char* data = nullptr;

  // Memory of exactly this size, which does not begin at a multiple of more than the element's.
  static Tensor of(Type type, Shape shape);
  int64_t elements() const { return elements_of(shape); }
  int64_t bytes() const { return elements() * bytes_of(type); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

using Attribute = std::variant<float, int64_t, std::string, std::vector<float>, std::vector<int64_t>>;

// A node and the tensors of one call.
struct Call {
  std::map<std::string, Attribute> attributes;
  std::vector<std::unique_ptr<Tensor>> inputs;   // null: left out
  std::vector<bool> has_output;                  // false: left out
  std::vector<int> in_place;                     // of every output: the input whose memory it takes, or -1
  std::vector<std::unique_ptr<Tensor>> outputs;  // what the kernel has requested
  std::vector<Tensor*> output_of;                // the same, or an input
};

// All ops that `RegisterCustomOps` adds.
const std::vector<const OrtCustomOp*>& ops();

// Creates the kernel and runs it: as a session does. True where it ran; false where it was refused, in one sentence.
bool run(const OrtCustomOp& op, Call& call);

}  // namespace sharp::fuzz
