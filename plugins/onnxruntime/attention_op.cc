// `ai.sharp::SharpAttention` on the CPU.
//
// In place: bind present_key and present_value to the buffers of past_key and past_value, with past_lens, and only the
// new rows are written. An output that a node leaves out is not computed.
#include "attention_op.h"

#include <algorithm>

#include "converted.h"

namespace sharp::ort {
namespace attention {
namespace {

struct AttentionKernel {
  NodeAttributes attributes;
  ElementTypes types;

  void compute(const Ort::KernelContext& context) const {
    const cpu::ParallelFor parallel = [&](int64_t count, const std::function<void(int64_t)>& body) {
      parallel_for(context, count, body);
    };
    Inputs inputs = read_attention_inputs(context, attributes.values, types);
    const ONNXTensorElementDataType type = types.compute;
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
    const int64_t columns = problem.attributes.stats_columns;
    float* stats =
        static_cast<float*>(output_of(context, kStats, {problem.batch, problem.q_heads, problem.queries, columns}));
    if (inputs.collect_stats != nullptr && *inputs.collect_stats)
      problem.stats = stats;
    else if (stats != nullptr)
      std::fill_n(stats, rows * columns, 0.0f);
    cpu::contiguous_attention(problem, parallel);
    output.finish();
    write(context, kPresentKey, inputs, inputs.past_key, inputs.key, head_dim, parallel);
    write(context, kPresentValue, inputs, inputs.past_value, inputs.value, value_dim, parallel);
  }

 private:
  void write(const Ort::KernelContext& context, Output output, const Inputs& inputs, const void* past,
             const void* fresh, int64_t dim, const cpu::ParallelFor& parallel) const {
    const cpu::ContiguousProblem& problem = inputs.problem;
    void* present = output_of(context, output, {problem.batch, problem.kv_heads, inputs.slots(), dim});
    if (present == nullptr) return;
    const auto copy = [&](auto element) {
      using Element = decltype(element);
      const cpu::ContiguousRows<Element> rows{static_cast<const Element*>(past), inputs.capacity(),
                                              static_cast<const Element*>(fresh), problem.keys.new_keys, dim};
      cpu::write_present(rows, problem.batch, problem.kv_heads, inputs.slots(), problem.past,
                         inputs.shared_buffer() ? &problem.total : nullptr, static_cast<Element*>(present), parallel);
    };
    if (types.compute == kFloat32)
      copy(float{});
    else
      copy(uint16_t{});
  }
};

struct AttentionOp : AttentionSchema<AttentionOp, AttentionKernel> {
  using AttentionSchema::AttentionSchema;
};

struct OldAttentionOp : OldAttentionSchema<OldAttentionOp, AttentionKernel> {
  using OldAttentionSchema::OldAttentionSchema;
};

}  // namespace
}  // namespace attention

std::vector<const OrtCustomOp*> attention_ops() {
  std::vector<const OrtCustomOp*> ops = ops_of<attention::AttentionOp>(attention::kTypes);
  for (const OrtCustomOp* op : ops_of<attention::OldAttentionOp>(attention::kTypes)) ops.push_back(op);
  return ops;
}

}  // namespace sharp::ort
