// In place: bind present_key and present_value to the buffers of past_key and past_value, with past_lens, and only the
// new rows are written. An output that a node leaves out is not computed.
#include "attention_op.h"

#include <algorithm>

#include "attention_inputs.h"
#include "converted.h"
#include "runtime.h"

namespace sharp::ort {
namespace attention {
namespace {

constexpr int64_t kStatistics = 4;

struct AttentionKernel {
  NodeAttributes attributes;
  ONNXTensorElementDataType type, past_type;

  OrtStatusPtr ComputeV2(OrtKernelContext* ort_context) {
    try {
      compute(Ort::KernelContext(ort_context));
    } catch (const std::exception& error) {
      return status_of("Attention", error);
    }
    return nullptr;
  }

 private:
  void compute(const Ort::KernelContext& context) const {
    const cpu::ParallelFor parallel = [&](int64_t count, const std::function<void(int64_t)>& body) {
      parallel_for(context, count, body);
    };
    Inputs inputs = read_attention_inputs(context, attributes.values);
    if (inputs.past_key != nullptr && past_type != type)
      throw InputError("past_key is float32 and query is not; they must be of one type");
    cpu::ContiguousProblem& problem = inputs.problem;
    const int64_t pairs = problem.batch * problem.kv_heads, rows = problem.batch * problem.q_heads * problem.queries;
    const int64_t head_dim = problem.keys.dim, value_dim = problem.values.dim, fresh = pairs * problem.keys.new_keys;
    const FloatInput query(inputs.query, rows * head_dim, type), key(inputs.key, fresh * head_dim, type);
    const FloatInput value(inputs.value, fresh * value_dim, type);
    const FloatInput past_key(inputs.past_key, pairs * inputs.capacity() * head_dim, type);
    const FloatInput past_value(inputs.past_value, pairs * inputs.capacity() * value_dim, type);
    problem.query = query.get();
    problem.keys.fresh = key.get();
    problem.keys.past = past_key.get();
    problem.values.fresh = value.get();
    problem.values.past = past_value.get();
    const std::vector<int64_t> shape = {problem.batch, problem.q_heads, problem.queries, value_dim};
    FloatOutput output(output_of(context, kOutput, shape), rows * value_dim, type);
    problem.output = output.get();
    float* stats =
        static_cast<float*>(output_of(context, kStats, {problem.batch, problem.q_heads, problem.queries, kStatistics}));
    if (inputs.collect_stats)
      problem.stats = stats;
    else if (stats != nullptr)
      std::fill_n(stats, rows * kStatistics, 0.0f);
    cpu::contiguous_attention(problem, parallel);
    output.finish();
    write(context, kPresentKey, inputs, inputs.past_key, inputs.key, head_dim, parallel);
    write(context, kPresentValue, inputs, inputs.past_value, inputs.value, value_dim, parallel);
  }

  void write(const Ort::KernelContext& context, Output output, const Inputs& inputs, const void* past,
             const void* fresh, int64_t dim, const cpu::ParallelFor& parallel) const {
    const cpu::ContiguousProblem& problem = inputs.problem;
    void* present = output_of(context, output, {problem.batch, problem.kv_heads, inputs.places(), dim});
    if (present == nullptr) return;
    const auto copy = [&](auto element) {
      using Element = decltype(element);
      const cpu::ContiguousRows<Element> rows{static_cast<const Element*>(past), inputs.capacity(),
                                              static_cast<const Element*>(fresh), problem.keys.new_keys, dim};
      cpu::write_present(rows, problem.batch, problem.kv_heads, inputs.places(), problem.past,
                         inputs.shared_buffer ? &problem.total : nullptr, static_cast<Element*>(present), parallel);
    };
    if (type == kFloat32)
      copy(float{});
    else
      copy(uint16_t{});
  }
};

struct AttentionOp : Ort::CustomOpBase<AttentionOp, AttentionKernel, true> {
  AttentionOp(ONNXTensorElementDataType element_type, ONNXTensorElementDataType type_of_past)
      : type(element_type), past_type(type_of_past) {
    OrtCustomOp::version = kApiVersion;
  }

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    try {
      auto created = std::make_unique<AttentionKernel>();
      read_attributes(Ort::ConstKernelInfo(info), created->attributes);
      created->type = type;
      created->past_type = past_type;
      *kernel = created.release();
    } catch (const std::exception& error) {
      return status_of("Attention", error);
    }
    return nullptr;
  }

  const char* GetName() const { return "Attention"; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return kOutputCount; }

  ONNXTensorElementDataType GetInputType(size_t index) const {
    if (index == kCollectStats) return ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
    if (index == kPastLens || index == kTotalLens) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    if (index == kPastKey || index == kPastValue) return past_type;
    return index <= kValue ? type : kFloat32;
  }
  ONNXTensorElementDataType GetOutputType(size_t index) const { return index == kStats ? kFloat32 : type; }

  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index >= kPastKey ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t index) const {
    return index >= kPresentKey ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }

  ONNXTensorElementDataType type, past_type;
};

}  // namespace
}  // namespace attention

std::vector<const OrtCustomOp*> attention_ops() {
  // The last two are for nodes without a past: what stands for it may be an empty tensor of float32.
  static const attention::AttentionOp ops[] = {
      {kFloat32, kFloat32}, {kFloat16, kFloat16}, {kBfloat16, kBfloat16}, {kFloat16, kFloat32}, {kBfloat16, kFloat32}};
  std::vector<const OrtCustomOp*> found;
  for (const attention::AttentionOp& op : ops) found.push_back(&op);
  return found;
}

}  // namespace sharp::ort
