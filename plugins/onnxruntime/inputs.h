// The boundary between ONNX Runtime and a call of an op: attributes and tensors in, a checked call out.
#pragma once

#include <vector>

#include "check.h"
#include "element_types.h"

namespace sharp::ort {

// Reads the attributes of a node; attributes that the node leaves out have their defaults. Throws InputError.
SharpAttributes read_attributes(const Ort::ConstKernelInfo& info);

// The shapes and data of a node's inputs, in the order of the op's tables.
struct NodeInputs {
  NodeInputs(const Ort::KernelContext& context, const ParameterDefinition* inputs, size_t count);

  std::vector<InputShape> shapes;
  std::vector<const void*> data;  // null for inputs that are left out
};

// Returns a call filled from a node's attributes, types and inputs. Sizes are checked, numbers are not. Throws
// InputError.
template <typename Op>
typename Op::Call read_call(const Ort::KernelContext& context, const SharpAttributes& attributes, ElementTypes types) {
  const NodeInputs inputs(context, Op::kInputs, Op::kInputCount);
  typename Op::Call call{};
  call.attributes = attributes;
  call.type = sharp_type(types.compute);
  if constexpr (std::is_same_v<Op, Paged>) call.cache_type = sharp_type(types.cache);
  read_shapes(inputs.shapes.data(), call);
  for (size_t input = 0; input < inputs.data.size(); ++input)
    *reinterpret_cast<const void**>(reinterpret_cast<char*>(&call) + Op::kInputs[input].buffer) = inputs.data[input];
  return call;
}

}  // namespace sharp::ort
