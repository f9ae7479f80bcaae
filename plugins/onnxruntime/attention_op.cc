// In place: bind present_key and present_value to the buffers of past_key and past_value, with past_lens, and only the
// new rows are written. An output that a node leaves out is not computed.
#include "attention_op.h"

#include <algorithm>

#include "attention_inputs.h"
#include "runtime.h"

namespace sharp::ort {
namespace attention {
namespace {

// The output's memory, null when the node leaves it out.
float* output_of(const Ort::KernelContext& context, Output output, const std::vector<int64_t>& shape) {
  if (static_cast<size_t>(output) >= context.GetOutputCount()) return nullptr;
  Ort::UnownedValue value = context.GetOutput(output, shape);
  return static_cast<OrtValue*>(value) == nullptr ? nullptr : value.GetTensorMutableData<float>();
}

struct AttentionKernel {
  NodeAttributes attributes;

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
    cpu::ContiguousProblem& problem = inputs.problem;
    problem.output = output_of(context, kOutput, {problem.batch, problem.q_heads, problem.queries, problem.values.dim});
    float* stats = output_of(context, kStats, {problem.batch, problem.q_heads, problem.queries, 4});
    if (inputs.collect_stats)
      problem.stats = stats;
    else if (stats != nullptr)
      std::fill_n(stats, problem.batch * problem.q_heads * problem.queries * 4, 0.0f);
    cpu::contiguous_attention(problem, parallel);
    write(context, kPresentKey, inputs, problem.keys, parallel);
    write(context, kPresentValue, inputs, problem.values, parallel);
  }

  static void write(const Ort::KernelContext& context, Output output, const Inputs& inputs,
                    const cpu::ContiguousRows& rows, const cpu::ParallelFor& parallel) {
    const cpu::ContiguousProblem& problem = inputs.problem;
    float* present = output_of(context, output, {problem.batch, problem.kv_heads, inputs.places(), rows.dim});
    if (present == nullptr) return;
    cpu::write_present(rows, problem.batch, problem.kv_heads, inputs.places(), problem.past,
                       inputs.shared_buffer ? &problem.total : nullptr, present, parallel);
  }
};

struct AttentionOp : Ort::CustomOpBase<AttentionOp, AttentionKernel, true> {
  AttentionOp() { OrtCustomOp::version = kApiVersion; }

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    try {
      auto created = std::make_unique<AttentionKernel>();
      read_attributes(Ort::ConstKernelInfo(info), created->attributes);
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
    const bool is_length = index == kPastLens || index == kTotalLens;
    return is_length ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }

  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index >= kPastKey ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t index) const {
    return index >= kPresentKey ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
};

}  // namespace
}  // namespace attention

const OrtCustomOp* attention_op() {
  static const attention::AttentionOp op;
  return &op;
}

}  // namespace sharp::ort
