// The custom-op library of ONNX Runtime, and its `ai.sharp::PagedAttention` in float32 on the CPU.
//
// In place: bind key_cache_out and value_cache_out to the buffers of key_cache and value_cache and nothing is copied.
// Otherwise the runtime gives the outputs memory of their own and the caches are copied first.
#include <algorithm>
#include <cstring>
#include <exception>

#include "attention_op.h"
#include "inputs.h"
#include "isa.h"
#include "paged_attention.h"
#include "runtime.h"

namespace sharp::ort {
namespace {

constexpr int64_t kCopyFloats = 1 << 18;  // floats copied by one task

// The output's buffer with the input's content: the same memory when it is bound so.
float* updated_cache(const Ort::KernelContext& context, Input input, Output output,
                     const cpu::ParallelFor& parallel_for) {
  const Ort::ConstValue from_value = context.GetInput(input);
  const auto info = from_value.GetTensorTypeAndShapeInfo();
  const std::vector<int64_t> shape = info.GetShape();
  const int64_t size = static_cast<int64_t>(info.GetElementCount());
  const float* from = from_value.GetTensorData<float>();
  float* to = context.GetOutput(output, shape).GetTensorMutableData<float>();
  if (to == from) return to;
  parallel_for((size + kCopyFloats - 1) / kCopyFloats, [&](int64_t task) {
    const int64_t begin = task * kCopyFloats;
    std::memcpy(to + begin, from + begin, std::min(kCopyFloats, size - begin) * sizeof(float));
  });
  return to;
}

struct PagedAttentionKernel {
  NodeAttributes attributes;

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
    cpu::Problem problem = read_inputs(context, attributes.values);
    problem.key_cache = updated_cache(context, kKeyCache, kKeyCacheOut, parallel);
    problem.value_cache = updated_cache(context, kValueCache, kValueCacheOut, parallel);
    problem.output =
        context.GetOutput(kOutput, {problem.tokens, problem.q_heads, problem.value_dim}).GetTensorMutableData<float>();
    float* stats = context.GetOutput(kStats, {problem.tokens, problem.q_heads, 4}).GetTensorMutableData<float>();
    if (collects_stats(context))
      problem.stats = stats;
    else
      std::fill_n(stats, problem.tokens * problem.q_heads * 4, 0.0f);
    cpu::paged_attention(problem, parallel);
  }
};

struct PagedAttentionOp : Ort::CustomOpBase<PagedAttentionOp, PagedAttentionKernel, true> {
  PagedAttentionOp() {
    OrtCustomOp::version = kApiVersion;
    // A cache that is an intermediate value and not needed again may be updated in place too.
    OrtCustomOp::GetMayInplace = [](int** inputs, int** outputs) -> size_t {
      *inputs = new int[2]{kKeyCache, kValueCache};
      *outputs = new int[2]{kKeyCacheOut, kValueCacheOut};
      return 2;
    };
    OrtCustomOp::ReleaseMayInplace = [](int* inputs, int* outputs) {
      delete[] inputs;
      delete[] outputs;
    };
  }

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    try {
      auto created = std::make_unique<PagedAttentionKernel>();
      read_attributes(Ort::ConstKernelInfo(info), created->attributes);
      *kernel = created.release();
    } catch (const std::exception& error) {
      return status_of("PagedAttention", error);
    }
    return nullptr;
  }

  const char* GetName() const { return "PagedAttention"; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return kOutputCount; }

  ONNXTensorElementDataType GetInputType(size_t index) const {
    if (index == kCollectStats) return ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
    const bool is_index = index >= kSlotMapping && index <= kContextLens;
    return is_index ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }

  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index >= kHeadParams ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
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
    static const sharp::ort::PagedAttentionOp op;
    static const Ort::CustomOpDomain domain = [] {
      Ort::CustomOpDomain created("ai.sharp");
      created.Add(&op);
      created.Add(sharp::ort::attention_op());
      return created;
    }();
    return api->AddCustomOpDomain(options, domain);
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  }
}
