// A custom-op library that registers the CUDA ops of libsharp_ops.so in ONNX Runtime as ops of the CPU. Sessions then
// run the ops over host memory, where a fake driver records their launches. The ops see a copy of ONNX Runtime's table
// of functions, in which only the functions about a GPU's stream and its memory are replaced.
#include <dlfcn.h>
#include <onnxruntime_c_api.h>

#include <cstring>

namespace {

const OrtApi* real;
OrtApi changed;
OrtApiBase base;
OrtStatus* ORT_API_CALL add(OrtCustomOpDomain* domain, const OrtCustomOp* op) noexcept {
  const char* provider = op->GetExecutionProviderType(op);
  if (provider == nullptr || std::strcmp(provider, "CUDAExecutionProvider") != 0) return nullptr;
  const_cast<OrtCustomOp*>(op)->GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  return real->CustomOpDomain_Add(domain, op);
}

OrtStatus* ORT_API_CALL stream_of(const OrtKernelContext*, void** stream) noexcept {
  *stream = reinterpret_cast<void*>(77);
  return nullptr;
}

// Replaces ONNX Runtime's function, which needs a stream, which the CPU lacks.
OrtStatus* ORT_API_CALL scratch_buffer(const OrtKernelContext* context, const OrtMemoryInfo* memory, size_t bytes,
                                       void** buffer) noexcept {
  OrtAllocator* allocator = nullptr;
  if (OrtStatus* status = real->KernelContext_GetAllocator(context, memory, &allocator)) return status;
  *buffer = allocator->Alloc(allocator, bytes);
  real->ReleaseAllocator(allocator);
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                                            const OrtApiBase* given) {
  real = given->GetApi(21);
  std::memcpy(&changed, real, sizeof(changed));
  changed.CustomOpDomain_Add = add;
  changed.KernelContext_GetGPUComputeStream = stream_of;
  changed.KernelContext_GetScratchBuffer = scratch_buffer;
  base = *given;
  base.GetApi = [](uint32_t) noexcept -> const OrtApi* { return &changed; };
  void* library = dlopen(LIBRARY, RTLD_NOW);
  if (library == nullptr) return real->CreateStatus(ORT_FAIL, dlerror());
  const auto register_ops =
      reinterpret_cast<OrtStatus*(ORT_API_CALL*)(OrtSessionOptions*, const OrtApiBase*)>(dlsym(library, "RegisterCustomOps"));
  return register_ops(options, &base);
}
