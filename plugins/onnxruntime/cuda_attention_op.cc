// `ai.sharp::SharpAttention` for CUDAExecutionProvider: the kernels of libsharp_cuda.so on the step's stream.
//
// Every input stays on the device: its numbers cannot be checked here without waiting for the device, only its shape.
// New keys that find no slot in a shared buffer are left out, where the CPU's op refuses the call.
//
// In place: bind present_key and present_value to the buffers of past_key and past_value, with past_lens.
#include "attention_op.h"
#include "cuda_library.h"

namespace sharp::ort {
namespace attention {
namespace {

// All of a call but its outputs.
SharpAttention call_of(const Inputs& from, ElementTypes types) {
  const cpu::ContiguousProblem& problem = from.problem;
  SharpAttention call{};
  call.attributes = attributes_of(problem.attributes);
  call.batch = problem.batch;
  call.q_heads = problem.q_heads;
  call.kv_heads = problem.kv_heads;
  call.queries = problem.queries;
  call.new_keys = problem.keys.new_keys;
  call.head_dim = problem.keys.dim;
  call.value_dim = problem.values.dim;
  call.type = sharp_type(types.compute);
  call.query = from.query;
  call.key = from.key;
  call.value = from.value;
  // A past without slots is none: its memory, of no bytes, may have no address. In a shared buffer without slots the
  // new keys find none either.
  if (from.capacity() > 0) {
    call.capacity = from.capacity();
    call.has_past = true;
    call.shared = from.shared_buffer();
    call.past_key = from.past_key;
    call.past_value = from.past_value;
    call.past_lens = from.past_lens;
  } else if (from.shared_buffer()) {
    call.new_keys = 0;
  }
  call.total_lens = from.total_lens;
  call.head_params = problem.head_params;
  call.head_params_width = problem.head_params_width;
  call.alibi = problem.alibi_slopes != nullptr;
  call.alibi_slopes = problem.alibi_slopes;
  call.collect_stats = reinterpret_cast<const uint8_t*>(from.collect_stats);
  return call;
}

struct CudaAttentionKernel {
  NodeAttributes attributes;
  ElementTypes types;

  void compute(const Ort::KernelContext& context) const {
    const CudaLibrary& library = *cuda_library();
    const Inputs inputs = read_attention_shapes(context, attributes.values, types);
    SharpAttention call = call_of(inputs, types);
    const auto present = [&](Output output, int64_t dim) {
      return output_of(context, output, {call.batch, call.kv_heads, inputs.slots(), dim});
    };
    call.output = output_of(context, kOutput, {call.batch, call.q_heads, call.queries, call.value_dim});
    call.present_key = present(kPresentKey, call.head_dim);
    call.present_value = present(kPresentValue, call.value_dim);
    call.has_presents = call.present_key != nullptr && call.present_value != nullptr;
    const int64_t columns = call.attributes.stats_columns;
    call.stats = static_cast<float*>(output_of(context, kStats, {call.batch, call.q_heads, call.queries, columns}));
    if (call.batch == 0) return;
    size_t bytes = 0;
    library.check(library.attention_workspace_bytes(&call, &bytes));
    const Scratch workspace(context, context.GetInput(kQuery).GetTensorMemoryInfo(), bytes);
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
}  // namespace attention

std::vector<const OrtCustomOp*> cuda_attention_ops() {
  if (cuda_library() == nullptr) return {};
  std::vector<const OrtCustomOp*> ops = ops_of<attention::CudaAttentionOp>(attention::kTypes);
  for (const OrtCustomOp* op : ops_of<attention::OldCudaAttentionOp>(attention::kTypes)) ops.push_back(op);
  return ops;
}

}  // namespace sharp::ort
