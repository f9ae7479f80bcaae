// The custom-op library of ONNX Runtime, and its `ai.sharp::PagedAttention` on the CPU, for every pair of T and C that
// the op has. All arithmetic is float32; query, key, value and output of another type are converted at the edge.
//
// In place: bind key_cache_out and value_cache_out to the buffers of key_cache and value_cache and nothing is copied.
// Otherwise the runtime gives the outputs memory of their own and the caches are copied first.
#include "paged_attention_op.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "attention_op.h"
#include "converted.h"
#include "isa.h"
#include "paged_attention.h"

namespace sharp::ort {
namespace {

constexpr int64_t kCopyBytes = 1 << 20;  // copied by one task

// The output's buffer with the input's content: the same memory when it is bound so.
void* updated(const Ort::KernelContext& context, Input input, Output output, int64_t element_bytes,
              const cpu::ParallelFor& parallel_for) {
  const Ort::ConstValue from_value = context.GetInput(input);
  const auto info = from_value.GetTensorTypeAndShapeInfo();
  const int64_t size = static_cast<int64_t>(info.GetElementCount()) * element_bytes;
  const char* from = static_cast<const char*>(from_value.GetTensorRawData());
  char* to = static_cast<char*>(output_of(context, output, info.GetShape()));
  if (to == nullptr && size > 0) {
    const std::string name = kInputNames[input];
    throw InputError(name + " is given, but the node has no output " + name + "_out; it needs both");
  }
  if (to == from) return to;
  parallel_for((size + kCopyBytes - 1) / kCopyBytes, [&](int64_t task) {
    const int64_t begin = task * kCopyBytes;
    std::memcpy(to + begin, from + begin, std::min(kCopyBytes, size - begin));
  });
  return to;
}

// An input of T as float.
FloatInput float_input(const Ort::KernelContext& context, Input input, ONNXTensorElementDataType type) {
  const Ort::ConstValue value = context.GetInput(input);
  return FloatInput(value.GetTensorRawData(), value.GetTensorTypeAndShapeInfo().GetElementCount(), type);
}

struct PagedAttentionKernel {
  NodeAttributes attributes;
  ElementTypes types;

  OrtStatusPtr ComputeV2(OrtKernelContext* ort_context) {
    try {
      compute(Ort::KernelContext(ort_context));
    } catch (const std::exception& error) {
      return status_of("PagedAttention", error);
    }
    return nullptr;
  }

 private:
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
    const int64_t cache_bytes = cpu::bytes_of(problem.cache_type);
    problem.key_cache = updated(context, kKeyCache, kKeyCacheOut, cache_bytes, parallel);
    problem.value_cache = updated(context, kValueCache, kValueCacheOut, cache_bytes, parallel);
    if (types.cache == kInt8) {
      problem.key_scale = static_cast<float*>(updated(context, kKeyScale, kKeyScaleOut, sizeof(float), parallel));
      problem.value_scale = static_cast<float*>(updated(context, kValueScale, kValueScaleOut, sizeof(float), parallel));
    }
    FloatOutput output(output_of(context, kOutput, {problem.tokens, problem.q_heads, problem.value_dim}),
                       problem.tokens * problem.q_heads * problem.value_dim, types.compute);
    problem.output = output.get();
    float* stats = context.GetOutput(kStats, {problem.tokens, problem.q_heads, 4}).GetTensorMutableData<float>();
    if (collects_stats(context))
      problem.stats = stats;
    else
      std::fill_n(stats, problem.tokens * problem.q_heads * 4, 0.0f);
    cpu::paged_attention(problem, parallel);
    output.finish();
  }
};

struct PagedAttentionOp : PagedAttentionSchema<PagedAttentionOp, PagedAttentionKernel> {
  using PagedAttentionSchema::PagedAttentionSchema;
};

}  // namespace
}  // namespace sharp::ort

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                                            const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(sharp::ort::kApiVersion);
  if (api == nullptr) return nullptr;  // an older runtime: it cannot be told; the op is then missing there
  Ort::InitApi(api);
  try {
    sharp::cpu::find_loops({});  // a wrong SHARP_ISA shows now, not at the first step
    // ONNX Runtime takes an op by its schema and then fails if no kernel has the model's types: all of them are here.
    static const sharp::ort::PagedAttentionOp ops[] = {
        sharp::ort::PagedAttentionOp({sharp::ort::kFloat32, sharp::ort::kFloat32}),
        sharp::ort::PagedAttentionOp({sharp::ort::kFloat32, sharp::ort::kFloat16}),
        sharp::ort::PagedAttentionOp({sharp::ort::kFloat32, sharp::ort::kBfloat16}),
        sharp::ort::PagedAttentionOp({sharp::ort::kFloat32, sharp::ort::kInt8}),
        sharp::ort::PagedAttentionOp({sharp::ort::kFloat16, sharp::ort::kFloat16}),
        sharp::ort::PagedAttentionOp({sharp::ort::kBfloat16, sharp::ort::kBfloat16}),
    };
    static const Ort::CustomOpDomain domain = [] {
      Ort::CustomOpDomain created("ai.sharp");
      for (const sharp::ort::PagedAttentionOp& op : ops) created.Add(&op);
      for (const OrtCustomOp* op : sharp::ort::cuda_paged_attention_ops()) created.Add(op);
      for (const OrtCustomOp* op : sharp::ort::attention_ops()) created.Add(op);
      return created;
    }();
    return api->AddCustomOpDomain(options, domain);
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  }
}
