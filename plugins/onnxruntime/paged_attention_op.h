// `ai.sharp::PagedAttention` for ONNX Runtime, the same on every execution provider: its types, and its in-place
// updates.
#pragma once

#include <string>
#include <vector>

#include "custom_op.h"

namespace sharp::ort {

// The types of the op on every provider.
constexpr std::initializer_list<ElementTypes> kPagedTypes = {
    {kFloat32, kFloat32},   {kFloat32, kFloat16}, {kFloat32, kBfloat16}, {kFloat32, kInt8},
    {kFloat32, kFloat8},    {kFloat16, kFloat16}, {kFloat16, kInt8},     {kFloat16, kFloat8},
    {kBfloat16, kBfloat16}, {kBfloat16, kInt8},   {kBfloat16, kFloat8}};

// Returns the output's buffer with the input's content. If both are not bound to the same memory,
// `copy(to, from, bytes)` is called to fill the buffer. Throws InputError.
template <typename Copy>
void* updated(const Ort::KernelContext& context, Paged::Input input, Paged::Output output, int64_t element_bytes,
              const Copy& copy) {
  const Ort::ConstValue value = context.GetInput(input);
  const auto info = value.GetTensorTypeAndShapeInfo();
  const int64_t bytes = static_cast<int64_t>(info.GetElementCount()) * element_bytes;
  const void* from = value.GetTensorRawData();
  void* to = output_of(context, output, info.GetShape());
  if (to == nullptr && bytes > 0) {
    const std::string name = Paged::kInputs[input].name;
    throw InputError(name + " is given, but the node has no output " + name + "_out; it needs both");
  }
  if (to != from && bytes > 0) copy(to, from, bytes);
  return to;
}

// Replaces the caches, the scales and the key screen of a call by the outputs' memory, which gets their content by
// `copy(to, from, bytes)` if it is not the same memory. Throws InputError if the node lacks such an output.
template <typename Copy>
void set_caches(const Ort::KernelContext& context, SharpPagedAttention& call, const Copy& copy) {
  const int64_t bytes = bytes_of(call.cache_type);
  call.key_cache = updated(context, Paged::kKeyCache, Paged::kKeyCacheOut, bytes, copy);
  call.value_cache = updated(context, Paged::kValueCache, Paged::kValueCacheOut, bytes, copy);
  if (has_scales(call.cache_type)) {
    call.key_scale = static_cast<float*>(updated(context, Paged::kKeyScale, Paged::kKeyScaleOut, sizeof(float), copy));
    call.value_scale =
        static_cast<float*>(updated(context, Paged::kValueScale, Paged::kValueScaleOut, sizeof(float), copy));
  }
  if (call.screened) {
    call.key_screen = static_cast<int8_t*>(updated(context, Paged::kKeyScreen, Paged::kKeyScreenOut, 1, copy));
  } else if (context.GetInputCount() > Paged::kKeyScreen) {
    const Ort::ConstValue value = context.GetInput(Paged::kKeyScreen);  // a screen without blocks has an output, too
    if (static_cast<const OrtValue*>(value) != nullptr)
      output_of(context, Paged::kKeyScreenOut, value.GetTensorTypeAndShapeInfo().GetShape());
  }
}

// Returns the op for the CPU.
std::vector<const OrtCustomOp*> paged_attention_ops();

// Returns the op for CUDAExecutionProvider; none if libsharp_cuda.so is not next to this library.
std::vector<const OrtCustomOp*> cuda_paged_attention_ops();

}  // namespace sharp::ort
