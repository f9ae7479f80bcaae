// libsharp_cuda.so, which our ops for CUDAExecutionProvider call. This library looks for libsharp_cuda.so when it is
// loaded, so that the same build serves CPU wheels, which lack libsharp_cuda.so.
#pragma once

#include "element_types.h"
#include "inputs.h"
#include "sharp_cuda.h"

namespace sharp::ort {

// The functions of libsharp_cuda.so, without their prefix.
struct CudaLibrary {
  decltype(&::sharp_cuda_workspace_bytes) workspace_bytes;
  decltype(&::sharp_cuda_paged_attention) paged_attention;
  decltype(&::sharp_cuda_attention_workspace_bytes) attention_workspace_bytes;
  decltype(&::sharp_cuda_attention) attention;
  decltype(&::sharp_cuda_copy) copy;
  decltype(&::sharp_cuda_last_error) last_error;

  // Throws std::runtime_error with the library's message unless `status`, the result of a function, is 0.
  void check(int status) const {
    if (status != 0) throw std::runtime_error(last_error());
  }
};

// Returns libsharp_cuda.so, or null if it does not lie next to this library.
const CudaLibrary* cuda_library();

// Returns the CUDA stream of a step.
inline SharpStream stream_of(const Ort::KernelContext& context) {
  return static_cast<SharpStream>(context.GetGPUComputeStream());
}

// Device memory for work on the step's stream. It may be released as soon as the work is enqueued, because ONNX Runtime
// gives it to another stream only after that work is done.
class Scratch {
 public:
  Scratch(const Ort::KernelContext& context, const OrtMemoryInfo* memory, size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() const { return buffer_; }

 private:
  OrtAllocator* allocator_ = nullptr;
  void* buffer_ = nullptr;
};

}  // namespace sharp::ort
