// The functions of PagedAttention in sharp_cuda.h.
#include <algorithm>
#include <utility>

#include "plan.h"

using namespace sharp::cuda;

SHARP_EXPORT int sharp_cuda_workspace_bytes(const SharpPagedAttention* problem, int or_smaller, size_t* bytes) {
  return status_of([&] {
    check_call(*problem);
    const Call call{*problem};
    const SharpPlan planned = plan(call);
    Buffers buffers(nullptr);
    Scratch(buffers, or_smaller ? planned.largest : planned.scratch);
    *bytes = buffers.bytes();
  });
}

SHARP_EXPORT int sharp_cuda_prepare(const SharpPagedAttention* problem) {
  return status_of([&] {
    check_call(*problem);
    Call call{*problem};
    const int64_t sequences = std::max<int64_t>(1, problem->sequences);
    // Prepare decoding alone, decoding beside a prompt, a prompt short enough to split its keys, and a long prompt.
    for (const auto& [some, tokens] : {std::pair{sequences, sequences},
                                       {sequences, sequences + kSomePrompt},
                                       {int64_t{1}, kMostTokens + 1},
                                       {int64_t{1}, kLongPrompt}}) {
      call.problem.sequences = some;
      call.problem.tokens = tokens;
      load_kernels(call);
    }
  });
}

SHARP_EXPORT int sharp_cuda_paged_attention(const SharpPagedAttention* problem, void* workspace, SharpStream stream) {
  return status_of([&] {
    check_call(*problem);
    if (problem->tokens == 0) return;
    require(workspace != nullptr, "the workspace is null");
    const Call call{*problem};
    const SharpPlan planned = plan(call);
    Buffers buffers(workspace);
    const Scratch scratch(buffers, planned.scratch);
    launch(call, planned, scratch, stream);
  });
}

SHARP_EXPORT int sharp_cuda_add_kernels(const char* folder) {
  return status_of([&] { add_kernels(folder); });
}

SHARP_EXPORT int sharp_cuda_find_kernel(const char* kernel, int32_t compute_capability) {
  return status_of([&] { require(choose_image(kernel, compute_capability) != nullptr, "there is no such kernel"); });
}

SHARP_EXPORT int sharp_cuda_device(SharpDevice* device) {
  return status_of([&] { *device = {static_cast<int32_t>(multiprocessors()), compute_capability()}; });
}

SHARP_EXPORT int sharp_cuda_zero(void* to, size_t bytes, SharpStream stream) {
  return status_of([&] {
    if (bytes > 0)
      check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(to), 0, bytes, stream), "clearing memory");
  });
}

SHARP_EXPORT int sharp_cuda_copy(void* to, const void* from, size_t bytes, SharpStream stream) {
  return status_of([&] {
    check(driver().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), bytes,
                                     stream),
          "copying on the device");
  });
}

SHARP_EXPORT const char* sharp_cuda_last_error(void) { return last_error().c_str(); }
