// `ai.sharp::SharpAttention` for CUDAExecutionProvider: the kernels of libsharp_cuda.so on the step's stream.
//
// Inputs stay on the device, so only shapes can be checked here: checking numbers would wait for the device. New keys
// without a free slot in a shared buffer are dropped, where the op on the CPU refuses the call.
//
// For an update in place, give past_lens and bind present_key and present_value to the buffers of past_key and
// past_value.
#include "attention_op.h"
#include "cuda_library.h"

namespace sharp::ort {
namespace {

struct CudaAttentionKernel {
  SharpAttributes attributes;
  ElementTypes types;

  void compute(const Ort::KernelContext& context) const {
    const CudaLibrary& library = *cuda_library();
    SharpAttention call = read_attention(context, attributes, types);
    const int64_t slots = slots_of(call);
    // A past without slots counts as no past, because its memory of 0 bytes may have no address. In a shared buffer
    // without slots no new key is stored.
    if (call.capacity == 0) {
      if (call.shared) call.new_keys = 0;
      call.has_past = call.shared = false;
      call.past_key = call.past_value = nullptr;
      call.past_lens = nullptr;
    }
    const auto present = [&](Contiguous::Output output, int64_t dim) {
      return output_of(context, output, {call.batch, call.kv_heads, slots, dim});
    };
    call.output = output_of(context, Contiguous::kOutput, {call.batch, call.q_heads, call.queries, call.value_dim});
    call.present_key = present(Contiguous::kPresentKey, call.head_dim);
    call.present_value = present(Contiguous::kPresentValue, call.value_dim);
    call.has_presents = call.present_key != nullptr && call.present_value != nullptr;
    call.stats = static_cast<float*>(output_of(
        context, Contiguous::kStats, {call.batch, call.q_heads, call.queries, int64_t{attributes.stats_columns}}));
    if (call.batch == 0) return;
    size_t bytes = 0;
    library.check(library.attention_workspace_bytes(&call, false, &bytes));
    const Scratch workspace(context, context.GetInput(Contiguous::kQuery).GetTensorMemoryInfo(), bytes);
    library.check(library.attention(&call, workspace.get(), stream_of(context)));
  }
};

struct CudaAttentionOp : AttentionSchema<CudaAttentionOp, CudaAttentionKernel> {
  using AttentionSchema::AttentionSchema;
  const char* GetExecutionProviderType() const { return "CUDAExecutionProvider"; }
};

struct OldCudaAttentionOp : OldAttentionSchema<OldCudaAttentionOp, CudaAttentionKernel> {
  using OldAttentionSchema::OldAttentionSchema;
  const char* GetExecutionProviderType() const { return "CUDAExecutionProvider"; }
};

}  // namespace

std::vector<const OrtCustomOp*> cuda_attention_ops() {
  if (cuda_library() == nullptr) return {};
  std::vector<const OrtCustomOp*> ops = ops_of<CudaAttentionOp>(kContiguousTypes);
  for (const OrtCustomOp* op : ops_of<OldCudaAttentionOp>(kContiguousTypes)) ops.push_back(op);
  return ops;
}

}  // namespace sharp::ort
