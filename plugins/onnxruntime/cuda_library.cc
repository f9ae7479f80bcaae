#include "cuda_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <string>

namespace sharp::ort {

const CudaLibrary* cuda_library() {
  static const CudaLibrary* const library = []() -> const CudaLibrary* {
    void* handle = dlopen("libsharp_cuda.so", RTLD_NOW | RTLD_LOCAL);  // the linker looks in our own folder
    if (handle == nullptr) return nullptr;
    static CudaLibrary found;  // never unloaded, as the device may still run its code
    const auto look_up = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      if (function == nullptr) throw std::runtime_error(std::string("libsharp_cuda.so has no ") + name);
    };
    look_up(found.workspace_bytes, "sharp_cuda_workspace_bytes");
    look_up(found.paged_attention, "sharp_cuda_paged_attention");
    look_up(found.attention_workspace_bytes, "sharp_cuda_attention_workspace_bytes");
    look_up(found.attention, "sharp_cuda_attention");
    look_up(found.copy, "sharp_cuda_copy");
    look_up(found.last_error, "sharp_cuda_last_error");
    return &found;
  }();
  return library;
}

SharpType sharp_type(ONNXTensorElementDataType type) {
  if (type == kFloat16) return SHARP_FLOAT16;
  if (type == kBfloat16) return SHARP_BFLOAT16;
  if (type == kFloat8) return SHARP_FP8;
  return type == kInt8 ? SHARP_INT8 : SHARP_FLOAT32;
}

// Both have the order of the op's definition.
static_assert(static_cast<int>(cpu::NormalizerKind::kSoftmax) == SHARP_SOFTMAX &&
              static_cast<int>(cpu::NormalizerKind::kEntmax) == SHARP_ENTMAX &&
              static_cast<int>(cpu::NormalizerKind::kSoftpick) == SHARP_SOFTPICK);

SharpAttributes attributes_of(const cpu::Attributes& from) {
  if (from.temperature_terms > SHARP_MAX_TEMPERATURE_TERMS)
    throw InputError("attribute temperature_coefficients has " + std::to_string(from.temperature_terms) +
                     " numbers; on a GPU there are at most " + std::to_string(SHARP_MAX_TEMPERATURE_TERMS));
  SharpAttributes attributes{};
  attributes.normalizer = static_cast<SharpNormalizer>(from.normalizer);
  attributes.scale = from.scale;
  attributes.alpha = from.alpha;
  std::copy_n(from.temperature_coefficients, from.temperature_terms, attributes.temperature_coefficients);
  attributes.temperature_terms = static_cast<int32_t>(from.temperature_terms);
  attributes.entropy_threshold = from.entropy_threshold;
  attributes.softcap = from.softcap;
  attributes.window = static_cast<int32_t>(std::min<int64_t>(from.window, INT32_MAX));
  attributes.causal = from.causal;
  attributes.stats_columns = static_cast<int32_t>(from.stats_columns);
  return attributes;
}

Scratch::Scratch(const Ort::KernelContext& context, const OrtMemoryInfo* memory, size_t bytes) {
  const OrtApi& api = Ort::GetApi();
  Ort::ThrowOnError(api.KernelContext_GetAllocator(context.GetOrtKernelContext(), memory, &allocator_));
  const OrtStatusPtr status =
      api.KernelContext_GetScratchBuffer(context.GetOrtKernelContext(), memory, bytes, &buffer_);
  if (status != nullptr) api.ReleaseAllocator(allocator_);
  Ort::ThrowOnError(status);
}

Scratch::~Scratch() {
  allocator_->Free(allocator_, buffer_);
  Ort::GetApi().ReleaseAllocator(allocator_);
}

}  // namespace sharp::ort
