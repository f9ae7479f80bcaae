// libsharp_cuda.so, which our ops for CUDAExecutionProvider call. It is looked for when this library is loaded, so that
// the CPU's wheel is this same library without the other.
#pragma once

#include "element_types.h"
#include "inputs.h"
#include "sharp_cuda.h"

namespace sharp::ort {

// Its functions, without their prefix.
struct CudaLibrary {
  decltype(&::sharp_cuda_workspace_bytes) workspace_bytes;
  decltype(&::sharp_cuda_paged_attention) paged_attention;
  decltype(&::sharp_cuda_attention_workspace_bytes) attention_workspace_bytes;
  decltype(&::sharp_cuda_attention) attention;
  decltype(&::sharp_cuda_copy) copy;
  decltype(&::sharp_cuda_last_error) last_error;

  void check(int status) const {
    if (status != 0) throw std::runtime_error(last_error());
  }
};

// Null where there is none.
const CudaLibrary* cuda_library();

SharpType sharp_type(ONNXTensorElementDataType type);

// Throws InputError.
SharpAttributes attributes_of(const cpu::Attributes& from);

inline SharpStream stream_of(const Ort::KernelContext& context) {
  return static_cast<SharpStream>(context.GetGPUComputeStream());
}

// Device memory for work on the step's stream: ONNX Runtime gives it to another stream when that work is done, so it
// may be given back as soon as the work is enqueued.
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
