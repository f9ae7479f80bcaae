// The custom-op library of ONNX Runtime, and its `ai.sharp::PagedAttention` on the CPU, for every pair of T and C that
// the op has. All arithmetic is float32; query, key, value and output of another type are converted before and after.
//
// In place: bind key_cache_out and value_cache_out to the buffers of key_cache and value_cache and nothing is copied.
// Otherwise the runtime gives the outputs memory of their own and the caches are copied first.
#include "paged_attention_op.h"

#include <algorithm>
#include <cstring>

#include "attention_op.h"
#include "converted.h"
#include "isa.h"
#include "paged_attention.h"

namespace sharp::ort {
namespace {

constexpr int64_t kCopyBytes = 1 << 20;  // copied by one task

// An input of T as float.
FloatInput float_input(const Ort::KernelContext& context, Input input, ONNXTensorElementDataType type) {
  const Ort::ConstValue value = context.GetInput(input);
  return FloatInput(value.GetTensorRawData(), value.GetTensorTypeAndShapeInfo().GetElementCount(), type);
}

struct PagedAttentionKernel {
  NodeAttributes attributes;
  ElementTypes types;

  void compute(const Ort::KernelContext& context) const {
    const cpu::ParallelFor parallel = [&](int64_t count, const std::function<void(int64_t)>& body) {
      parallel_for(context, count, body);
    };
    cpu::Problem problem = read_inputs(context, attributes.values, types.cache_type());
    const FloatInput query = float_input(context, kQuery, types.compute);
    const FloatInput key = float_input(context, kKey, types.compute);
    const FloatInput value = float_input(context, kValue, types.compute);
    problem.query = query.get();
    problem.key = key.get();
    problem.value = value.get();
    const auto copy = [&](void* to, const void* from, int64_t bytes) {
      parallel((bytes + kCopyBytes - 1) / kCopyBytes, [&](int64_t task) {
        const int64_t begin = task * kCopyBytes;
        std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                    std::min(kCopyBytes, bytes - begin));
      });
    };
    set_caches(context, types, problem, copy);
    problem.key_screen = key_screen_of(context, copy);
    FloatOutput output(output_of(context, kOutput, {problem.tokens, problem.q_heads, problem.value_dim}),
                       problem.tokens * problem.q_heads * problem.value_dim, types.compute);
    problem.output = output.get();
    const int64_t columns = problem.attributes.stats_columns;
    float* stats = context.GetOutput(kStats, {problem.tokens, problem.q_heads, columns}).GetTensorMutableData<float>();
    if (collects_stats(context))
      problem.stats = stats;
    else
      std::fill_n(stats, problem.tokens * problem.q_heads * columns, 0.0f);
    cpu::paged_attention(problem, parallel);
    output.finish();
  }
};

struct PagedAttentionOp : PagedAttentionSchema<PagedAttentionOp, PagedAttentionKernel> {
  using PagedAttentionSchema::PagedAttentionSchema;
};

}  // namespace

std::vector<const OrtCustomOp*> paged_attention_ops() { return ops_of<PagedAttentionOp>(kPagedTypes); }

}  // namespace sharp::ort

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                                            const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(sharp::ort::kApiVersion);
  if (api == nullptr) return nullptr;  // an older runtime: it cannot be told; the op is then missing there
  Ort::InitApi(api);
  try {
    sharp::cpu::find_loops({});  // a wrong SHARP_ISA shows now, not at the first step
    static const Ort::CustomOpDomain domain = [] {
      Ort::CustomOpDomain created("ai.sharp");
      for (const auto ops : {sharp::ort::paged_attention_ops, sharp::ort::cuda_paged_attention_ops,
                             sharp::ort::attention_ops, sharp::ort::cuda_attention_ops})
        for (const OrtCustomOp* op : ops()) created.Add(op);
      return created;
    }();
    return api->AddCustomOpDomain(options, domain);
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  }
}
