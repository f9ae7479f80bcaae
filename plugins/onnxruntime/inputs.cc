#include "inputs.h"

#include <cmath>
#include <limits>
#include <string>

#include "head_params.h"
#include "screen.h"

namespace sharp::ort {

const char* const kInputNames[kInputCount] = {"query",        "key",          "value",        "key_cache",
                                              "value_cache",  "slot_mapping", "block_table",  "query_start",
                                              "context_lens", "head_params",  "alibi_slopes", "collect_stats",
                                              "key_scale",    "value_scale",  "key_screen",   "key_shift"};

namespace {

using Shape = std::vector<int64_t>;

std::string text_of(const Shape& shape) {
  std::string text = "[";
  for (size_t axis = 0; axis < shape.size(); ++axis) text += (axis ? ", " : "") + std::to_string(shape[axis]);
  return text + "]";
}

// An input of the node; absent when it is not given or, by convention of the op, when it is optional and empty.
class Tensor {
 public:
  Tensor(const Ort::KernelContext& context, Input input) : input_(input) {
    if (static_cast<size_t>(input) >= context.GetInputCount()) return;
    const Ort::ConstValue value = context.GetInput(input);
    if (static_cast<const OrtValue*>(value) == nullptr) return;
    const auto info = value.GetTensorTypeAndShapeInfo();
    if (input >= kHeadParams && info.GetElementCount() == 0) return;
    shape_ = info.GetShape();
    data_ = value.GetTensorRawData();
    given_ = true;
  }

  bool given() const { return given_; }
  const float* floats() const { return static_cast<const float*>(data_); }
  const int32_t* ints() const { return static_cast<const int32_t*>(data_); }
  const bool* bools() const { return static_cast<const bool*>(data_); }
  int64_t dimension(size_t axis) const { return shape_[axis]; }

  void expect_rank(size_t rank, const char* dimensions) const {
    if (!given_) throw InputError(std::string(kInputNames[input_]) + " is missing; the op needs it");
    if (shape_.size() != rank) fail(std::string("must have the dimensions ") + dimensions);
  }

  void expect_shape(const Shape& expected, const char* dimensions) const {
    expect_rank(expected.size(), dimensions);
    if (shape_ != expected) fail(std::string("must be ") + dimensions + " = " + text_of(expected));
  }

  [[noreturn]] void fail(const std::string& rule) const {
    throw InputError(std::string(kInputNames[input_]) + " has shape " + text_of(shape_) + "; it " + rule);
  }

 private:
  Input input_;
  bool given_ = false;
  Shape shape_;
  const void* data_ = nullptr;
};

[[noreturn]] void fail_element(const char* name, int64_t index, int64_t value, const std::string& rule) {
  throw InputError(std::string(name) + "[" + std::to_string(index) + "] is " + std::to_string(value) + "; it must be " +
                   rule);
}

std::string between(int64_t low, int64_t high) { return "from " + std::to_string(low) + " to " + std::to_string(high); }

// Keys of a sequence that its row of the block table has room for; positions are int32. The dimensions of an empty
// cache may be so large that their product is no int64.
int64_t most_keys(const cpu::Problem& problem) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return problem.max_blocks > kMost / problem.block_size ? kMost : problem.max_blocks * problem.block_size;
}

void check_sequences(const cpu::Problem& problem) {
  const int32_t* starts = problem.query_start;
  if (starts[0] != 0) fail_element("query_start", 0, starts[0], "0");
  for (int64_t sequence = 0; sequence < problem.sequences; ++sequence)
    if (starts[sequence + 1] < starts[sequence])
      fail_element("query_start", sequence + 1, starts[sequence + 1],
                   "at least its predecessor " + std::to_string(starts[sequence]));
  if (starts[problem.sequences] != problem.tokens)
    fail_element("query_start", problem.sequences, starts[problem.sequences],
                 "the number of tokens, " + std::to_string(problem.tokens));
  const int64_t capacity = most_keys(problem);
  for (int64_t sequence = 0; sequence < problem.sequences; ++sequence) {
    const int64_t queries = starts[sequence + 1] - starts[sequence];
    if (queries == 0) continue;
    const int64_t context = problem.context_lens[sequence];
    if (context < 0 || context + queries > capacity)
      fail_element("context_lens", sequence, context,
                   between(0, capacity - queries) +
                       " (max_blocks * block_size, and at most 2^31 - 1, less the sequence's new tokens)");
    const int32_t* table = problem.block_table + sequence * problem.max_blocks;
    for (int64_t index = 0; index * problem.block_size < context + queries; ++index)
      if (table[index] < -1 || table[index] >= problem.blocks)
        fail_element(
            "block_table", sequence * problem.max_blocks + index, table[index],
            between(-1, problem.blocks - 1) + " (the cache has " + std::to_string(problem.blocks) + " blocks)");
  }
}

void check_slots(const cpu::Problem& problem) {
  const int64_t slots = problem.blocks * problem.block_size;
  for (int64_t token = 0; token < problem.tokens; ++token)
    if (problem.slot_mapping[token] < -1 || problem.slot_mapping[token] >= slots)
      fail_element("slot_mapping", token, problem.slot_mapping[token], between(-1, slots - 1));
}

void check_key_shift(const cpu::Problem& problem) {
  if (problem.key_shift == nullptr) return;
  for (int64_t index = 0; index < problem.kv_heads * problem.head_dim; ++index)
    if (!(std::fabs(problem.key_shift[index]) < 1e9f))
      throw InputError("key_shift[" + std::to_string(index / problem.head_dim) + "][" +
                       std::to_string(index % problem.head_dim) + "] is " + std::to_string(problem.key_shift[index]) +
                       "; it must be a number between -1e9 and 1e9");
}

}  // namespace

bool is_given(const Ort::KernelContext& context, Input input) { return Tensor(context, input).given(); }

cpu::Problem read_shapes(const Ort::KernelContext& context, const cpu::Attributes& attributes,
                         cpu::CacheType cache_type) {
  const Tensor query(context, kQuery), key(context, kKey), value(context, kValue);
  const Tensor key_cache(context, kKeyCache), value_cache(context, kValueCache);
  const Tensor slot_mapping(context, kSlotMapping), block_table(context, kBlockTable);
  const Tensor query_start(context, kQueryStart), context_lens(context, kContextLens);
  const Tensor head_params(context, kHeadParams), alibi_slopes(context, kAlibiSlopes);
  query.expect_rank(3, "[tokens, q_heads, head_dim]");
  key.expect_rank(3, "[tokens, kv_heads, head_dim]");
  value.expect_rank(3, "[tokens, kv_heads, value_dim]");
  key_cache.expect_rank(4, "[blocks, kv_heads, head_dim, block_size]");
  block_table.expect_rank(2, "[sequences, max_blocks]");

  cpu::Problem problem{};
  problem.attributes = attributes;
  problem.tokens = query.dimension(0);
  problem.q_heads = query.dimension(1);
  problem.head_dim = query.dimension(2);
  problem.kv_heads = key.dimension(1);
  problem.value_dim = value.dimension(2);
  problem.blocks = key_cache.dimension(0);
  problem.block_size = key_cache.dimension(3);
  problem.sequences = block_table.dimension(0);
  problem.max_blocks = block_table.dimension(1);
  if (problem.q_heads == 0 || problem.head_dim == 0) query.fail("must have at least one head and one channel");
  if (problem.kv_heads == 0 || problem.q_heads % problem.kv_heads != 0)
    key.fail("must have a number of heads that divides the query's " + std::to_string(problem.q_heads));
  if (problem.value_dim == 0) value.fail("must have at least one channel");
  if (problem.block_size == 0) key_cache.fail("must have a block_size of at least 1");
  key.expect_shape({problem.tokens, problem.kv_heads, problem.head_dim}, "[tokens, kv_heads, head_dim]");
  value.expect_shape({problem.tokens, problem.kv_heads, problem.value_dim}, "[tokens, kv_heads, value_dim]");
  key_cache.expect_shape({problem.blocks, problem.kv_heads, problem.head_dim, problem.block_size},
                         "[blocks, kv_heads, head_dim, block_size]");
  value_cache.expect_shape({problem.blocks, problem.kv_heads, problem.block_size, problem.value_dim},
                           "[blocks, kv_heads, block_size, value_dim]");
  slot_mapping.expect_shape({problem.tokens}, "[tokens]");
  query_start.expect_shape({problem.sequences + 1}, "[sequences + 1]");
  context_lens.expect_shape({problem.sequences}, "[sequences]");
  if (alibi_slopes.given()) alibi_slopes.expect_shape({problem.q_heads}, "[q_heads]");

  problem.cache_type = cache_type;
  for (const Input name : {kKeyScale, kValueScale}) {
    const Tensor scale(context, name);
    if (cpu::has_scales(cache_type))
      scale.expect_shape({problem.blocks, problem.kv_heads}, "[blocks, kv_heads]");
    else if (scale.given())
      scale.fail("must be left out; only int8 and fp8 caches have scales");
  }
  const Tensor key_screen(context, kKeyScreen), key_shift(context, kKeyShift);
  if (key_screen.given()) {
    if (cpu::has_scales(cache_type)) key_screen.fail("must be left out; an int8 or fp8 cache has no key screen");
    key_screen.expect_shape({problem.blocks, problem.kv_heads, cpu::screen_bytes(problem)},
                            "[blocks, kv_heads, block_size * (head_dim rounded up to 4, and 8)]");
    if (key_shift.given()) {
      key_shift.expect_shape({problem.kv_heads, problem.head_dim}, "[kv_heads, head_dim]");
      problem.key_shift = key_shift.floats();
    }
  }
  problem.slot_mapping = slot_mapping.ints();
  problem.block_table = block_table.ints();
  problem.query_start = query_start.ints();
  problem.context_lens = context_lens.ints();
  problem.alibi_slopes = alibi_slopes.given() ? alibi_slopes.floats() : nullptr;
  read_head_params(head_params, head_params.floats(), problem);
  return problem;
}

cpu::Problem read_inputs(const Ort::KernelContext& context, const cpu::Attributes& attributes,
                         cpu::CacheType cache_type) {
  const cpu::Problem problem = read_shapes(context, attributes, cache_type);
  check_head_params(problem);
  check_key_shift(problem);
  check_slots(problem);
  check_sequences(problem);
  return problem;
}

bool collects_stats(const Ort::KernelContext& context) {
  const Tensor collect(context, kCollectStats);
  return collect.given() && collect.bools()[0];
}

}  // namespace sharp::ort
