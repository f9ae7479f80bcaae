// `ai.sharp::PagedAttention` as ONNX Runtime sees it, on every execution provider: names, types, what may be left out.
#pragma once

#include <string>
#include <vector>

#include "custom_op.h"

namespace sharp::ort {

// Types of the op, on every provider.
constexpr std::initializer_list<ElementTypes> kPagedTypes = {
    {kFloat32, kFloat32},   {kFloat32, kFloat16}, {kFloat32, kBfloat16}, {kFloat32, kInt8},
    {kFloat32, kFloat8},    {kFloat16, kFloat16}, {kFloat16, kInt8},     {kFloat16, kFloat8},
    {kBfloat16, kBfloat16}, {kBfloat16, kInt8},   {kBfloat16, kFloat8}};

template <typename Op, typename Kernel>
struct PagedAttentionSchema : CustomOp<Op, Kernel> {
  using CustomOp<Op, Kernel>::CustomOp;

  static constexpr const char* kName = "PagedAttention";
  static constexpr InPlace kInPlace[] = {{kKeyCache, kKeyCacheOut},
                                         {kValueCache, kValueCacheOut},
                                         {kKeyScale, kKeyScaleOut},
                                         {kValueScale, kValueScaleOut},
                                         {kKeyScreen, kKeyScreenOut}};

  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return kOutputCount; }

  ONNXTensorElementDataType GetInputType(size_t index) const {
    if (index == kCollectStats) return ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
    if (index >= kSlotMapping && index <= kContextLens) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    if (index == kKeyCache || index == kValueCache) return this->types.cache;
    if (index == kKeyScreen) return kInt8;
    return index <= kValue ? this->types.compute : kFloat32;
  }
  ONNXTensorElementDataType GetOutputType(size_t index) const {
    if (index == kKeyCacheOut || index == kValueCacheOut) return this->types.cache;
    if (index == kKeyScreenOut) return kInt8;
    return index == kOutput ? this->types.compute : kFloat32;
  }

  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index >= kHeadParams ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t index) const {
    return index >= kKeyScaleOut ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
};

// The output's buffer with the input's content: the same memory where it is bound so, else `copy(to, from, bytes)` is
// asked to fill it. Throws InputError.
template <typename Copy>
void* updated(const Ort::KernelContext& context, Input input, Output output, int64_t element_bytes, const Copy& copy) {
  const Ort::ConstValue value = context.GetInput(input);
  const auto info = value.GetTensorTypeAndShapeInfo();
  const int64_t bytes = static_cast<int64_t>(info.GetElementCount()) * element_bytes;
  const void* from = value.GetTensorRawData();
  void* to = output_of(context, output, info.GetShape());
  if (to == nullptr && bytes > 0) {
    const std::string name = kInputNames[input];
    throw InputError(name + " is given, but the node has no output " + name + "_out; it needs both");
  }
  if (to != from && bytes > 0) copy(to, from, bytes);
  return to;
}

// The caches of a cpu::Problem or a SharpPagedAttention, and the scales of int8 and fp8 ones.
template <typename Problem, typename Copy>
void set_caches(const Ort::KernelContext& context, ElementTypes types, Problem& problem, const Copy& copy) {
  const int64_t bytes = cpu::bytes_of(types.cache_type());
  problem.key_cache = updated(context, kKeyCache, kKeyCacheOut, bytes, copy);
  problem.value_cache = updated(context, kValueCache, kValueCacheOut, bytes, copy);
  if (!cpu::has_scales(types.cache_type())) return;
  problem.key_scale = static_cast<float*>(updated(context, kKeyScale, kKeyScaleOut, sizeof(float), copy));
  problem.value_scale = static_cast<float*>(updated(context, kValueScale, kValueScaleOut, sizeof(float), copy));
}

// The key screen with its output, null where there is none or an empty one.
template <typename Copy>
int8_t* key_screen_of(const Ort::KernelContext& context, const Copy& copy) {
  if (is_given(context, kKeyScreen)) return static_cast<int8_t*>(updated(context, kKeyScreen, kKeyScreenOut, 1, copy));
  if (context.GetInputCount() > kKeyScreen) {
    const Ort::ConstValue value = context.GetInput(kKeyScreen);
    if (static_cast<const OrtValue*>(value) != nullptr)
      output_of(context, kKeyScreenOut, value.GetTensorTypeAndShapeInfo().GetShape());
  }
  return nullptr;
}

// The op on the CPU.
std::vector<const OrtCustomOp*> paged_attention_ops();

// The op for CUDAExecutionProvider; none where libsharp_cuda.so does not lie beside this library.
std::vector<const OrtCustomOp*> cuda_paged_attention_ops();

}  // namespace sharp::ort
