#include "cuda_library.h"

#include <dlfcn.h>

#include <string>

namespace sharp::ort {

const CudaLibrary* cuda_library() {
  static const CudaLibrary* const library = []() -> const CudaLibrary* {
    // The loader also looks in the folder of this library.
    void* handle = dlopen("libsharp_cuda.so", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return nullptr;
    static CudaLibrary found;  // never unloaded, because the device may still run its code
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
