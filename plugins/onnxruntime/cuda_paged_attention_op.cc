// `ai.sharp::PagedAttention` for CUDAExecutionProvider: the kernels of libsharp_cuda.so on the step's stream.
//
// Every input stays on the device: its numbers cannot be checked here without waiting for the device, only its shape.
#include "cuda_library.h"
#include "paged_attention_op.h"

namespace sharp::ort {
namespace {

// All of a call but the caches and outputs.
SharpPagedAttention call_of(const cpu::Problem& from, ElementTypes types, const Ort::KernelContext& context) {
  SharpPagedAttention call{};
  call.attributes = attributes_of(from.attributes);
  call.tokens = from.tokens;
  call.q_heads = from.q_heads;
  call.kv_heads = from.kv_heads;
  call.head_dim = from.head_dim;
  call.value_dim = from.value_dim;
  call.blocks = from.blocks;
  call.block_size = from.block_size;
  call.sequences = from.sequences;
  call.max_blocks = from.max_blocks;
  call.type = sharp_type(types.compute);
  call.cache_type = sharp_type(types.cache);
  call.query = context.GetInput(kQuery).GetTensorRawData();
  call.key = context.GetInput(kKey).GetTensorRawData();
  call.value = context.GetInput(kValue).GetTensorRawData();
  call.slot_mapping = from.slot_mapping;
  call.block_table = from.block_table;
  call.query_start = from.query_start;
  call.context_lens = from.context_lens;
  call.head_params = from.head_params;
  call.head_params_width = from.head_params_width;
  call.alibi = from.alibi_slopes != nullptr;
  call.alibi_slopes = from.alibi_slopes;
  if (is_given(context, kCollectStats))
    call.collect_stats = static_cast<const uint8_t*>(context.GetInput(kCollectStats).GetTensorRawData());
  return call;
}

struct CudaPagedAttentionKernel {
  NodeAttributes attributes;
  ElementTypes types;

  void compute(const Ort::KernelContext& context) const {
    const CudaLibrary& library = *cuda_library();
    const cpu::Problem problem = read_shapes(context, attributes.values, types.cache_type());
    SharpPagedAttention call = call_of(problem, types, context);
    const SharpStream stream = stream_of(context);
    const auto copy = [&](void* to, const void* from, int64_t bytes) {
      library.check(library.copy(to, from, bytes, stream));
    };
    set_caches(context, types, call, copy);
    call.key_screen = key_screen_of(context, copy);
    call.screened = call.key_screen != nullptr;
    call.key_shift = problem.key_shift;
    call.output = output_of(context, kOutput, {call.tokens, call.q_heads, call.value_dim});
    const int64_t columns = call.attributes.stats_columns;
    call.stats = static_cast<float*>(output_of(context, kStats, {call.tokens, call.q_heads, columns}));
    if (call.tokens == 0) return;
    size_t bytes = 0;
    library.check(library.workspace_bytes(&call, &bytes));
    const Scratch workspace(context, context.GetInput(kQuery).GetTensorMemoryInfo(), bytes);
    library.check(library.paged_attention(&call, workspace.get(), stream));
  }
};

struct CudaPagedAttentionOp : PagedAttentionSchema<CudaPagedAttentionOp, CudaPagedAttentionKernel> {
  using PagedAttentionSchema::PagedAttentionSchema;
  const char* GetExecutionProviderType() const { return "CUDAExecutionProvider"; }
};

}  // namespace

std::vector<const OrtCustomOp*> cuda_paged_attention_ops() {
  if (cuda_library() == nullptr) return {};
  return ops_of<CudaPagedAttentionOp>(kPagedTypes);
}

}  // namespace sharp::ort
