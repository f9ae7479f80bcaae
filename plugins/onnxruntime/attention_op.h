// `ai.sharp::SharpAttention` as ONNX Runtime sees it, on every execution provider: names, types, what may be left out.
#pragma once

#include <vector>

#include "attention_inputs.h"
#include "custom_op.h"

namespace sharp::ort {
namespace attention {

// Types of the op, on every provider. The last two are for nodes without a past: what stands for it may be an empty
// tensor of float32.
constexpr std::initializer_list<ElementTypes> kTypes = {
    {kFloat32, kFloat32}, {kFloat16, kFloat16}, {kBfloat16, kBfloat16}, {kFloat16, kFloat32}, {kBfloat16, kFloat32}};

template <typename Op, typename Kernel>
struct AttentionSchema : CustomOp<Op, Kernel> {
  using CustomOp<Op, Kernel>::CustomOp;

  static constexpr const char* kName = "SharpAttention";
  // A shared buffer. The concatenating form has another size, unless there is no new key: then nothing is written.
  static constexpr InPlace kInPlace[] = {{kPastKey, kPresentKey}, {kPastValue, kPresentValue}};

  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return kOutputCount; }

  ONNXTensorElementDataType GetInputType(size_t index) const {
    if (index == kCollectStats) return ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
    if (index == kPastLens || index == kTotalLens) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    if (index == kPastKey || index == kPastValue) return this->types.cache;
    return index <= kValue ? this->types.compute : kFloat32;
  }
  ONNXTensorElementDataType GetOutputType(size_t index) const {
    return index == kStats ? kFloat32 : this->types.compute;
  }

  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index >= kPastKey ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t index) const {
    return index >= kPresentKey ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
};

// `Op` under the name that it had in models exported before: ONNX Runtime's quantizer took it for Microsoft's.
template <typename Op, typename Kernel>
struct OldAttentionSchema : AttentionSchema<Op, Kernel> {
  using AttentionSchema<Op, Kernel>::AttentionSchema;
  static constexpr const char* kName = "Attention";
};

}  // namespace attention

// The op on the CPU, under both names.
std::vector<const OrtCustomOp*> attention_ops();

// The op for CUDAExecutionProvider; none where libsharp_cuda.so does not lie beside this library.
std::vector<const OrtCustomOp*> cuda_attention_ops();

}  // namespace sharp::ort
