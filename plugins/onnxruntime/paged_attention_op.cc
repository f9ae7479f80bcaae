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
#include "half.h"
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
  char* to = static_cast<char*>(context.GetOutput(output, info.GetShape()).GetTensorMutableRawData());
  if (to == from) return to;
  parallel_for((size + kCopyBytes - 1) / kCopyBytes, [&](int64_t task) {
    const int64_t begin = task * kCopyBytes;
    std::memcpy(to + begin, from + begin, std::min(kCopyBytes, size - begin));
  });
  return to;
}

// A tensor of T as float: where it lies, or converted into memory of its own.
class FloatInput {
 public:
  FloatInput(const Ort::KernelContext& context, Input input, ONNXTensorElementDataType type) {
    const Ort::ConstValue value = context.GetInput(input);
    const void* from = value.GetTensorRawData();
    floats_ = static_cast<const float*>(from);
    if (type == kFloat32) return;
    converted_.resize(value.GetTensorTypeAndShapeInfo().GetElementCount());
    floats_ = converted_.data();
    for (size_t index = 0; index < converted_.size(); ++index)
      converted_[index] = type == kFloat16 ? cpu::to_float(static_cast<const cpu::Float16*>(from)[index])
                                           : cpu::to_float(static_cast<const cpu::Bfloat16*>(from)[index]);
  }
  const float* get() const { return floats_; }

 private:
  const float* floats_;
  std::vector<float> converted_;
};

// An output of T that is written as float; `finish` converts it where T is another type.
class FloatOutput {
 public:
  FloatOutput(const Ort::KernelContext& context, const std::vector<int64_t>& shape, ONNXTensorElementDataType type)
      : to_(context.GetOutput(kOutput, shape).GetTensorMutableRawData()), type_(type) {
    if (type != kFloat32) floats_.resize(shape[0] * shape[1] * shape[2]);
  }
  float* get() { return type_ == kFloat32 ? static_cast<float*>(to_) : floats_.data(); }
  void finish() const {
    for (size_t index = 0; index < floats_.size(); ++index)
      if (type_ == kFloat16)
        static_cast<cpu::Float16*>(to_)[index] = cpu::to_float16(floats_[index]);
      else
        static_cast<cpu::Bfloat16*>(to_)[index] = cpu::to_bfloat16(floats_[index]);
  }

 private:
  void* to_;
  ONNXTensorElementDataType type_;
  std::vector<float> floats_;
};

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
    const FloatInput query(context, kQuery, types.compute), key(context, kKey, types.compute);
    const FloatInput value(context, kValue, types.compute);
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
    if (is_given(context, kKeyNorm))
      problem.key_norm = static_cast<float*>(updated(context, kKeyNorm, kKeyNormOut, sizeof(float), parallel));
    FloatOutput output(context, {problem.tokens, problem.q_heads, problem.value_dim}, types.compute);
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
      created.Add(sharp::ort::attention_op());
      return created;
    }();
    return api->AddCustomOpDomain(options, domain);
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  }
}
