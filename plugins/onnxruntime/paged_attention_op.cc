// The custom-op library for ONNX Runtime, and `ai.sharp::PagedAttention` on the CPU for every pair of T and C. All
// arithmetic is float32; query, key, value and output of another type are converted before and after.
//
// For an update in place without copies, bind key_cache_out and value_cache_out to the buffers of key_cache and
// value_cache. Otherwise the runtime allocates the outputs, and the caches are copied first.
#include "paged_attention_op.h"

#include <algorithm>
#include <cstring>

#include "attention_op.h"
#include "converted.h"
#include "isa.h"
#include "paged_attention.h"

namespace sharp::ort {
namespace {

constexpr int64_t kCopyBytes = 1 << 20;  // bytes copied by one task

struct PagedAttentionKernel {
  SharpAttributes attributes;
  ElementTypes types;

  void compute(const Ort::KernelContext& context) const {
    const cpu::ParallelFor parallel = [&](int64_t count, const std::function<void(int64_t)>& body) {
      parallel_for(context, count, body);
    };
    cpu::Problem problem{};
    static_cast<SharpPagedAttention&>(problem) = read_call<Paged>(context, attributes, types);
    check_numbers(problem);
    problem.sinks = sinks_of(problem);
    const int64_t tokens = problem.tokens, new_rows = tokens * problem.kv_heads;
    const FloatInput query(problem.query, tokens * problem.q_heads * problem.head_dim, types.compute);
    const FloatInput key(problem.key, new_rows * problem.head_dim, types.compute);
    const FloatInput value(problem.value, new_rows * problem.value_dim, types.compute);
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
    set_caches(context, problem, copy);
    const int64_t rows = tokens * problem.q_heads, columns = attributes.stats_columns;
    FloatOutput output(output_of(context, Paged::kOutput, {tokens, problem.q_heads, problem.value_dim}),
                       rows * problem.value_dim, types.compute);
    problem.output = output.get();
    float* stats = context.GetOutput(Paged::kStats, {tokens, problem.q_heads, columns}).GetTensorMutableData<float>();
    if (problem.collect_stats != nullptr && *problem.collect_stats)
      problem.stats = stats;
    else
      std::fill_n(stats, rows * columns, 0.0f);
    cpu::paged_attention(problem, parallel);
    output.finish();
  }
};

struct PagedAttentionOp : CustomOp<PagedAttentionOp, PagedAttentionKernel, Paged> {
  using CustomOp::CustomOp;
};

}  // namespace

std::vector<const OrtCustomOp*> paged_attention_ops() { return ops_of<PagedAttentionOp>(kPagedTypes); }

}  // namespace sharp::ort

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                                            const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(sharp::ort::kApiVersion);
  if (api == nullptr) return nullptr;  // an older runtime, which cannot be told so; the op is then missing
  Ort::InitApi(api);
  try {
    sharp::cpu::find_loops({});  // a wrong SHARP_ISA is reported now, not at the first step
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
