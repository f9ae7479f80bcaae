#include "attention_inputs.h"

#include <algorithm>
#include <limits>

#include "head_params.h"
#include "tensor.h"

namespace sharp::ort::attention {
namespace {

std::string element(const char* name, int64_t index, int64_t value, const std::string& rule) {
  return std::string(name) + "[" + std::to_string(index) + "] is " + std::to_string(value) + "; it must be " + rule;
}

// Fills past and total, and checks that what counts has room.
void read_lengths(Inputs& inputs) {
  cpu::ContiguousProblem& problem = inputs.problem;
  const int64_t capacity = problem.keys.capacity, new_keys = problem.keys.new_keys;
  for (int64_t sequence = 0; sequence < problem.batch; ++sequence) {
    const int64_t past = inputs.shared_buffer() ? inputs.past_lens[sequence] : capacity;
    if (past < 0 || past > capacity)
      throw InputError(element("past_lens", sequence, past, "from 0 to " + std::to_string(capacity) + " (capacity)"));
    int64_t total = past + new_keys;
    if (inputs.total_lens != nullptr) {
      const int64_t given = inputs.total_lens[sequence];
      if (given < 0) throw InputError(element("total_lens", sequence, given, "0 or more"));
      total = std::min(total, given);
    }
    if (inputs.shared_buffer() && total > capacity)
      throw InputError("past_lens[" + std::to_string(sequence) + "] is " + std::to_string(past) + ", and with " +
                       std::to_string(new_keys) + " new keys that is more than the buffer's " +
                       std::to_string(capacity) + " slots; make it larger, or leave keys out with total_lens");
    problem.past.push_back(static_cast<int32_t>(past));
    problem.total.push_back(static_cast<int32_t>(total));
  }
}

}  // namespace

Inputs read_attention_shapes(const Ort::KernelContext& context, const cpu::Attributes& attributes, ElementTypes types) {
  const NamedTensor query(context, kQuery, "query", false), key(context, kKey, "key", false);
  const NamedTensor value(context, kValue, "value", false);
  const NamedTensor past_key(context, kPastKey, "past_key", true), past_value(context, kPastValue, "past_value", true);
  const NamedTensor past_lens(context, kPastLens, "past_lens", true);
  const NamedTensor total_lens(context, kTotalLens, "total_lens", true);
  const NamedTensor head_params(context, kHeadParams, "head_params", true);
  const NamedTensor alibi_slopes(context, kAlibiSlopes, "alibi_slopes", true);
  const NamedTensor collect_stats(context, kCollectStats, "collect_stats", true);
  query.expect_rank(4, "[batch, q_heads, queries, head_dim]");
  key.expect_rank(4, "[batch, kv_heads, new_keys, head_dim]");
  value.expect_rank(4, "[batch, kv_heads, new_keys, value_dim]");

  Inputs inputs{};
  cpu::ContiguousProblem& problem = inputs.problem;
  problem.attributes = attributes;
  problem.batch = query.dimension(0);
  problem.q_heads = query.dimension(1);
  problem.queries = query.dimension(2);
  problem.kv_heads = key.dimension(1);
  const int64_t new_keys = key.dimension(2), head_dim = query.dimension(3), value_dim = value.dimension(3);
  if (problem.q_heads == 0 || head_dim == 0) query.fail("must have at least one head and one channel");
  if (problem.kv_heads == 0 || problem.q_heads % problem.kv_heads != 0)
    key.fail("must have a number of heads that divides the query's " + std::to_string(problem.q_heads));
  if (value_dim == 0) value.fail("must have at least one channel");
  key.expect_shape({problem.batch, problem.kv_heads, new_keys, head_dim}, "[batch, kv_heads, new_keys, head_dim]");
  value.expect_shape({problem.batch, problem.kv_heads, new_keys, value_dim}, "[batch, kv_heads, new_keys, value_dim]");
  if (past_key.given() != past_value.given())
    throw InputError("past_key and past_value must be given together; one is missing");
  if (past_lens.given() && !past_key.given())
    throw InputError("past_lens is given without past_key; it needs a buffer");
  if (past_key.given() && types.cache != types.compute)
    throw InputError("past_key is float32 and query is not; they must be of one type");
  int64_t capacity = 0;
  if (past_key.given()) {
    past_key.expect_rank(4, "[batch, kv_heads, past or capacity, head_dim]");
    capacity = past_key.dimension(2);
    past_key.expect_shape({problem.batch, problem.kv_heads, capacity, head_dim},
                          "[batch, kv_heads, past or capacity, head_dim]");
    past_value.expect_shape({problem.batch, problem.kv_heads, capacity, value_dim},
                            "[batch, kv_heads, past or capacity, value_dim]");
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto too_many = [](int64_t a, int64_t b) { return a != 0 && b > kMost / a; };  // a * b may not fit an int64
  if (new_keys > kMost || capacity > kMost - new_keys || too_many(problem.batch, problem.queries))
    throw InputError("the call has more than 2^31 - 1 keys in a sequence or queries in all; split it");
  if (past_lens.given()) past_lens.expect_shape({problem.batch}, "[batch]");
  if (total_lens.given()) total_lens.expect_shape({problem.batch}, "[batch]");
  if (alibi_slopes.given()) alibi_slopes.expect_shape({problem.q_heads}, "[q_heads]");

  inputs.query = query.data<void>();
  inputs.key = key.data<void>();
  inputs.value = value.data<void>();
  inputs.past_key = past_key.data<void>();
  inputs.past_value = past_value.data<void>();
  inputs.past_lens = past_lens.data<int32_t>();
  inputs.total_lens = total_lens.data<int32_t>();
  inputs.collect_stats = collect_stats.elements() == 0 ? nullptr : collect_stats.data<bool>();
  problem.keys = {nullptr, capacity, nullptr, new_keys, head_dim};
  problem.values = {nullptr, capacity, nullptr, new_keys, value_dim};
  problem.alibi_slopes = alibi_slopes.data<float>();
  read_head_params(head_params, head_params.data<float>(), problem);
  return inputs;
}

Inputs read_attention_inputs(const Ort::KernelContext& context, const cpu::Attributes& attributes, ElementTypes types) {
  Inputs inputs = read_attention_shapes(context, attributes, types);
  check_head_params(inputs.problem);
  read_lengths(inputs);
  return inputs;
}

}  // namespace sharp::ort::attention
