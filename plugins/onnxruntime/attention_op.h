// `ai.sharp::SharpAttention` for ONNX Runtime, the same on every execution provider: its types and its former name.
#pragma once

#include <vector>

#include "custom_op.h"

namespace sharp::ort {

// The types of the op on every provider. The last two are for nodes without a past, whose place an empty tensor of
// float32 may take.
constexpr std::initializer_list<ElementTypes> kContiguousTypes = {
    {kFloat32, kFloat32}, {kFloat16, kFloat16}, {kBfloat16, kBfloat16}, {kFloat16, kFloat32}, {kBfloat16, kFloat32}};

template <typename Op, typename Kernel>
struct AttentionSchema : CustomOp<Op, Kernel, Contiguous> {
  using CustomOp<Op, Kernel, Contiguous>::CustomOp;

  // The presents have type T, because C differs from T only if no past is given.
  ONNXTensorElementDataType GetOutputType(size_t index) const {
    return index == Contiguous::kStats ? kFloat32 : this->types.compute;
  }
};

// `Op` under its old name, for older models. The op was renamed, as ONNX Runtime's quantizer took it for Microsoft's.
template <typename Op, typename Kernel>
struct OldAttentionSchema : AttentionSchema<Op, Kernel> {
  using AttentionSchema<Op, Kernel>::AttentionSchema;
  static constexpr const char* kName = "Attention";
};

// Reads a call of the op; sizes are checked, numbers are not. Throws InputError.
inline SharpAttention read_attention(const Ort::KernelContext& context, const SharpAttributes& attributes,
                                     ElementTypes types) {
  const SharpAttention call = read_call<Contiguous>(context, attributes, types);
  if (call.has_past && types.cache != types.compute)
    throw InputError("past_key is float32 and query is not; they must be of one type");
  return call;
}

// Returns the op for the CPU, under both names.
std::vector<const OrtCustomOp*> attention_ops();

// Returns the op for CUDAExecutionProvider; none if libsharp_cuda.so is not next to this library.
std::vector<const OrtCustomOp*> cuda_attention_ops();

}  // namespace sharp::ort
