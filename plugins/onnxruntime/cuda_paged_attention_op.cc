// `ai.sharp::PagedAttention` for CUDAExecutionProvider: the kernels of libsharp_cuda.so on the step's stream.
//
// Inputs stay on the device, so only shapes can be checked here: checking numbers would wait for the device.
#include "cuda_library.h"
#include "paged_attention_op.h"

namespace sharp::ort {
namespace {

struct CudaPagedAttentionKernel {
  SharpAttributes attributes;
  ElementTypes types;

  void compute(const Ort::KernelContext& context) const {
    const CudaLibrary& library = *cuda_library();
    SharpPagedAttention call = read_call<Paged>(context, attributes, types);
    const SharpStream stream = stream_of(context);
    const auto copy = [&](void* to, const void* from, int64_t bytes) {
      library.check(library.copy(to, from, bytes, stream));
    };
    set_caches(context, call, copy);
    call.output = output_of(context, Paged::kOutput, {call.tokens, call.q_heads, call.value_dim});
    call.stats = static_cast<float*>(
        output_of(context, Paged::kStats, {call.tokens, call.q_heads, int64_t{attributes.stats_columns}}));
    if (call.tokens == 0) return;
    size_t bytes = 0;
    library.check(library.workspace_bytes(&call, false, &bytes));
    const Scratch workspace(context, context.GetInput(Paged::kQuery).GetTensorMemoryInfo(), bytes);
    library.check(library.paged_attention(&call, workspace.get(), stream));
  }
};

struct CudaPagedAttentionOp : CustomOp<CudaPagedAttentionOp, CudaPagedAttentionKernel, Paged> {
  using CustomOp::CustomOp;
  const char* GetExecutionProviderType() const { return "CUDAExecutionProvider"; }
};

}  // namespace

std::vector<const OrtCustomOp*> cuda_paged_attention_ops() {
  if (cuda_library() == nullptr) return {};
  return ops_of<CudaPagedAttentionOp>(kPagedTypes);
}

}  // namespace sharp::ort
