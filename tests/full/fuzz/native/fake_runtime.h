// A stand-in for ONNX Runtime: the part of its C API that the ops call, over tensors in memory of exactly their size.
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

// Returns the number of elements, or -1 where ONNX Runtime would not make such a tensor.
int64_t elements_of(const Shape& shape);

struct Tensor {
  Type type;
  Shape shape;
  std::unique_ptr<char[]> memory;
  char* data = nullptr;

  // Makes a tensor in memory of exactly its size, aligned to no more than its elements need.
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
  std::vector<std::unique_ptr<Tensor>> inputs;   // null where an input is left out
  std::vector<bool> has_output;                  // false where an output is left out
  std::vector<int> in_place;                     // by output, the input whose memory it uses, or -1
  std::vector<std::unique_ptr<Tensor>> outputs;  // new tensors that the kernel has requested
  std::vector<Tensor*> output_of;                // by output, its new tensor or the input that it uses
};

// All ops that `RegisterCustomOps` adds.
const std::vector<const OrtCustomOp*>& ops();

// Creates the kernel and runs it, as a session does. Returns false where the kernel refuses the call in one sentence.
bool run(const OrtCustomOp& op, Call& call);

}  // namespace sharp::fuzz
