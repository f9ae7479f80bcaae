// `ai.sharp::SharpAttention` on the CPU.
//
// For an update in place, give past_lens and bind present_key and present_value to the buffers of past_key and
// past_value. Then only the new rows are written. An output that a node leaves out is not computed.
#include "attention_op.h"

#include <algorithm>

#include "contiguous_attention.h"
#include "converted.h"

namespace sharp::ort {
namespace {

struct AttentionKernel {
  SharpAttributes attributes;
  ElementTypes types;

  void compute(const Ort::KernelContext& context) const {
    const cpu::ParallelFor parallel = [&](int64_t count, const std::function<void(int64_t)>& body) {
      parallel_for(context, count, body);
    };
    const SharpAttention call = read_attention(context, attributes, types);
    check_numbers(call);
    cpu::ContiguousProblem problem{};
    static_cast<SharpAttention&>(problem) = call;
    Lengths lengths = read_lengths(call);
    problem.past = std::move(lengths.past);
    problem.total = std::move(lengths.total);
    const ONNXTensorElementDataType type = types.compute;
    const int64_t pairs = call.batch * call.kv_heads, rows = call.batch * call.q_heads * call.queries;
    const int64_t head_dim = call.head_dim, value_dim = call.value_dim, fresh = pairs * call.new_keys;
    const FloatInput query(call.query, rows * head_dim, type), key(call.key, fresh * head_dim, type);
    const FloatInput value(call.value, fresh * value_dim, type);
    const FloatInput past_key(call.past_key, pairs * call.capacity * head_dim, type);
    const FloatInput past_value(call.past_value, pairs * call.capacity * value_dim, type);
    problem.query = query.get();
    problem.keys = {past_key.get(), call.capacity, key.get(), call.new_keys, head_dim};
    problem.values = {past_value.get(), call.capacity, value.get(), call.new_keys, value_dim};
    FloatOutput output(output_of(context, Contiguous::kOutput, {call.batch, call.q_heads, call.queries, value_dim}),
                       rows * value_dim, type);
    problem.output = output.get();
    const int64_t columns = attributes.stats_columns;
    float* stats =
        static_cast<float*>(output_of(context, Contiguous::kStats, {call.batch, call.q_heads, call.queries, columns}));
    if (call.collect_stats != nullptr && *call.collect_stats)
      problem.stats = stats;
    else if (stats != nullptr)
      std::fill_n(stats, rows * columns, 0.0f);
    cpu::contiguous_attention(problem, parallel);
    output.finish();
    write(context, Contiguous::kPresentKey, problem, call.past_key, call.key, head_dim, parallel);
    write(context, Contiguous::kPresentValue, problem, call.past_value, call.value, value_dim, parallel);
  }

 private:
  void write(const Ort::KernelContext& context, Contiguous::Output output, const cpu::ContiguousProblem& problem,
             const void* past, const void* fresh, int64_t dim, const cpu::ParallelFor& parallel) const {
    const int64_t slots = slots_of(problem);
    void* present = output_of(context, output, {problem.batch, problem.kv_heads, slots, dim});
    if (present == nullptr) return;
    const auto copy = [&](auto element) {
      using Element = decltype(element);
      const cpu::ContiguousRows<Element> rows{static_cast<const Element*>(past), problem.capacity,
                                              static_cast<const Element*>(fresh), problem.new_keys, dim};
      cpu::write_present(rows, problem.batch, problem.kv_heads, slots, problem.past,
                         problem.shared ? &problem.total : nullptr, static_cast<Element*>(present), parallel);
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

std::vector<const OrtCustomOp*> attention_ops() {
  std::vector<const OrtCustomOp*> ops = ops_of<AttentionOp>(kContiguousTypes);
  for (const OrtCustomOp* op : ops_of<OldAttentionOp>(kContiguousTypes)) ops.push_back(op);
  return ops;
}

}  // namespace sharp::ort
