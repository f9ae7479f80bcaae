#include "check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>
#include <type_traits>

namespace sharp {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
constexpr int64_t kNotRead = -2;  // a size that no input has set yet; -1: not known before the call runs
const char* const kPositive[] = {"q_heads", "kv_heads", "head_dim", "value_dim", "block_size"};

template <typename T>
T& at(void* structure, size_t offset) {
  return *reinterpret_cast<T*>(static_cast<char*>(structure) + offset);
}
template <typename T>
const T& at(const void* structure, size_t offset) {
  return *reinterpret_cast<const T*>(static_cast<const char*>(structure) + offset);
}

// Returns the shortest text that reads back as the same float32.
std::string text_of(double number) {
  std::ostringstream text;
  for (int digits = 6; digits <= 9; digits += 3) {
    text.str("");
    text.precision(digits);
    text << number;
    if (std::strtof(text.str().c_str(), nullptr) == static_cast<float>(number)) break;
  }
  return text.str();
}

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t axis = 0; axis < shape.size(); ++axis)
    text += (axis ? ", " : "") + (shape[axis] < 0 ? std::string("?") : std::to_string(shape[axis]));
  return text + "]";
}

[[noreturn]] void fail(const ParameterDefinition& input, const InputShape& shape, const std::string& rule) {
  throw InputError(std::string(input.name) + " has shape " + text_of(shape.sizes) + "; " + rule);
}

[[noreturn]] void fail_element(const char* name, int64_t index, int64_t value, const std::string& rule) {
  throw InputError(std::string(name) + "[" + std::to_string(index) + "] is " + std::to_string(value) + "; it must be " +
                   rule);
}

std::string between(int64_t low, int64_t high) { return "from " + std::to_string(low) + " to " + std::to_string(high); }

bool is_positive(const char* size) {
  return std::any_of(std::begin(kPositive), std::end(kPositive),
                     [&](const char* name) { return std::strcmp(name, size) == 0; });
}

// Reads the dimensions of an input: sizes not read before are set, all others must match.
template <typename Op>
void read_shape(const ParameterDefinition& input, const InputShape& shape, typename Op::Call& call) {
  if (input.rank < 0) return;
  if (shape.sizes.size() != static_cast<size_t>(input.rank))
    fail(input, shape, std::string("it must have the dimensions ") + input.shape);
  std::vector<int64_t> expected = shape.sizes;
  bool fits = true;
  for (int axis = 0; axis < input.rank; ++axis) {
    const Dimension dimension = input.dimensions[axis];
    const int64_t there = shape.sizes[axis];
    if constexpr (std::is_same_v<Op, Paged>)
      if (dimension.size < 0) expected[axis] = screen_bytes(call.head_dim, call.block_size);
    if (dimension.size >= 0) {
      int64_t& size = at<int64_t>(&call, Op::kSizes[dimension.size]);
      const char* name = Op::kSizeNames[dimension.size];
      if (size < 0) {
        size = there < 0 ? -1 : there - dimension.plus;
        if (there < 1 && is_positive(name))
          fail(input, shape, std::string(name) + (there < 0 ? " must be fixed in the model" : " must be at least 1"));
        if (std::strcmp(name, "kv_heads") == 0 && call.q_heads % size != 0)
          fail(input, shape, "kv_heads must divide q_heads, " + std::to_string(call.q_heads));
      }
      expected[axis] = size < 0 ? there : size + dimension.plus;
    }
    fits = fits && (there < 0 || there == expected[axis]);
  }
  if (!fits) fail(input, shape, std::string("it must be ") + input.shape + " = " + text_of(expected));
}

template <typename Op>
void read_all(const InputShape* inputs, typename Op::Call& call) {
  for (const size_t size : Op::kSizes) at<int64_t>(&call, size) = kNotRead;
  for (int index = 0; index < Op::kInputCount; ++index) {
    const ParameterDefinition& input = Op::kInputs[index];
    const bool there = is_there(input, inputs[index]);
    if (!there && !input.optional) throw InputError(std::string(input.name) + " is missing; the op needs it");
    if (input.flag >= 0) at<int32_t>(&call, input.flag) = there;
    if (there) read_shape<Op>(input, inputs[index], call);
  }
  for (const size_t size : Op::kSizes)
    if (at<int64_t>(&call, size) == kNotRead) at<int64_t>(&call, size) = 0;
}

template <typename Op>
void check_all_sizes(const typename Op::Call& call) {
  for (size_t size = 0; size < std::size(Op::kSizes); ++size) {
    const int64_t number = at<int64_t>(&call, Op::kSizes[size]);
    const bool positive = is_positive(Op::kSizeNames[size]);
    if (number < (positive ? 1 : -1))
      throw InputError(std::string(Op::kSizeNames[size]) + " is " + std::to_string(number) + "; it must be at least " +
                       (positive ? "1" : "0"));
  }
  if (call.multiprocessors < 0) throw InputError("multiprocessors must be 0 or more");
  if (call.q_heads % call.kv_heads != 0)
    throw InputError("kv_heads is " + std::to_string(call.kv_heads) + "; kv_heads must divide q_heads, " +
                     std::to_string(call.q_heads));
  if (call.type < SHARP_FLOAT32 || call.type > SHARP_BFLOAT16)
    throw InputError("query must be float32, float16 or bfloat16");
}

// Throws InputError for a wrong number of columns of head_params; 0 columns: it is left out.
template <typename Call>
void check_head_params_columns(const Call& call) {
  const NormalizerDefinition& normalizer = kNormalizers[call.attributes.normalizer];
  const int64_t columns = call.parameters, own = normalizer.columns;
  if (columns == 0 && (own == 0 || !normalizer.competes)) return;
  if (columns < 0 || columns == own || (columns == own + 1 && normalizer.competes)) return;
  const auto names_joined_by = [&](const char* separator) {
    std::string names;
    for (int64_t column = 0; column < own; ++column)
      names += (column ? separator : "") + std::string(normalizer.column_names[column]);
    return names;
  };
  const std::string names = names_joined_by(", ");
  const std::string takes = std::string(normalizer.name) + " takes ";
  if (columns == 0)
    throw InputError(std::string(normalizer.name) + " needs head_params [q_heads, " + std::to_string(own) +
                     "]: " + names_joined_by(" and ") + " of every head");
  std::string rule = "1 (the sink)";
  if (!normalizer.competes)
    rule = std::to_string(own) + " (" + names + ") and no sink: give it these, or leave it out";
  else if (own > 0)
    rule = std::to_string(own) + " (" + names + ") or " + std::to_string(own + 1) + " (the sink behind them)";
  throw InputError("head_params has " + std::to_string(columns) + " columns; " + takes + rule);
}

template <typename Call>
void check_head_params(const Call& call) {
  if (call.head_params == nullptr) return;
  const NormalizerDefinition& normalizer = kNormalizers[call.attributes.normalizer];
  for (int64_t head = 0; head < call.q_heads; ++head) {
    const float* row = call.head_params + head * call.parameters;
    const std::string name = "head_params[" + std::to_string(head) + "]";
    for (int64_t column = 0; column < normalizer.columns; ++column) {
      if (normalizer.positive && !(row[column] > 0)) {
        std::string rule;
        for (int64_t each = 0; each < normalizer.columns; ++each)
          rule += (each ? " and " : "") + std::string(normalizer.column_names[each]) + " > 0";
        throw InputError(name + " has " + normalizer.column_names[column] + " = " + text_of(row[column]) + "; " +
                         normalizer.name + " needs " + rule);
      }
      if (!normalizer.positive && !std::isfinite(row[column]))
        throw InputError(name + " has a number that is not finite");
    }
    if (call.parameters > normalizer.columns && !(row[normalizer.columns] < INFINITY))
      throw InputError(name + " has the sink " + text_of(row[normalizer.columns]) +
                       "; it must be a number, or -infinity for none");
  }
}

// Returns the number of keys that a row of the block table has room for, limited to int32 positions. The dimensions of
// an empty cache may be so large that their product overflows int64.
int64_t most_keys(const SharpPagedAttention& call) {
  return call.max_blocks > kMost / call.block_size ? kMost : call.max_blocks * call.block_size;
}

void check_sequences(const SharpPagedAttention& call) {
  const int32_t* starts = call.query_start;
  if (starts[0] != 0) fail_element("query_start", 0, starts[0], "0");
  for (int64_t sequence = 0; sequence < call.sequences; ++sequence)
    if (starts[sequence + 1] < starts[sequence])
      fail_element("query_start", sequence + 1, starts[sequence + 1],
                   "at least its predecessor " + std::to_string(starts[sequence]));
  if (starts[call.sequences] != call.tokens)
    fail_element("query_start", call.sequences, starts[call.sequences],
                 "the number of tokens, " + std::to_string(call.tokens));
  const int64_t capacity = most_keys(call);
  for (int64_t sequence = 0; sequence < call.sequences; ++sequence) {
    const int64_t queries = starts[sequence + 1] - starts[sequence];
    if (queries == 0) continue;
    const int64_t context = call.context_lens[sequence];
    if (context < 0 || context + queries > capacity)
      fail_element("context_lens", sequence, context,
                   between(0, capacity - queries) +
                       " (max_blocks * block_size, and at most 2^31 - 1, less the sequence's new tokens)");
    const int32_t* table = call.block_table + sequence * call.max_blocks;
    for (int64_t index = 0; index * call.block_size < context + queries; ++index)
      if (table[index] < -1 || table[index] >= call.blocks)
        fail_element("block_table", sequence * call.max_blocks + index, table[index],
                     between(-1, call.blocks - 1) + " (the cache has " + std::to_string(call.blocks) + " blocks)");
  }
}

}  // namespace

bool is_there(const ParameterDefinition& input, const InputShape& shape) {
  if (!shape.given || !input.optional) return shape.given;
  const bool past = input.type == TensorType::kC && shape.sizes.size() == static_cast<size_t>(input.rank);
  return past || std::find(shape.sizes.begin(), shape.sizes.end(), 0) == shape.sizes.end();
}

SharpNormalizer normalizer_named(const std::string& name) {
  std::string names;
  for (size_t index = 0; index < std::size(kNormalizers); ++index) {
    if (name == kNormalizers[index].name) return static_cast<SharpNormalizer>(index);
    names += (names.empty() ? "" : ", ") + std::string(kNormalizers[index].name);
  }
  constexpr size_t kShown = 64;  // maximum characters shown of a name, which a model's author chose
  std::string shown = name.substr(0, kShown);
  for (char& character : shown)
    if (character < ' ' || character > '~') character = '?';
  throw InputError("attribute normalizer is '" + shown + (name.size() > kShown ? "..." : "") + "'; it must be one of " +
                   names);
}

SharpAttributes default_attributes() {
  SharpAttributes attributes{};
  for (const AttributeDefinition& attribute : kAttributes)
    if (attribute.type == AttributeType::kFloat || attribute.type == AttributeType::kInt)
      set_number(attributes, attribute, attribute.fallback);
  set_coefficients(attributes, kDefaultCoefficients, std::size(kDefaultCoefficients));
  return attributes;
}

double number_of(const SharpAttributes& attributes, const AttributeDefinition& attribute) {
  if (attribute.type == AttributeType::kFloat) return at<float>(&attributes, attribute.offset);
  return at<int32_t>(&attributes, attribute.offset);
}

void set_number(SharpAttributes& attributes, const AttributeDefinition& attribute, double number) {
  if (attribute.type == AttributeType::kFloat)
    at<float>(&attributes, attribute.offset) = static_cast<float>(number);
  else
    at<int32_t>(&attributes, attribute.offset) =
        static_cast<int32_t>(std::clamp<double>(number, std::numeric_limits<int32_t>::min(), kMost));
}

void set_coefficients(SharpAttributes& attributes, const float* coefficients, int64_t count) {
  if (count < 1 || count > SHARP_MAX_TEMPERATURE_TERMS)
    throw InputError("attribute temperature_coefficients has " + std::to_string(count) +
                     " numbers; it must have 1 to " + std::to_string(SHARP_MAX_TEMPERATURE_TERMS));
  std::copy_n(coefficients, count, attributes.temperature_coefficients);
  attributes.temperature_terms = static_cast<int32_t>(count);
}

void check_attributes(const SharpAttributes& attributes, bool gpu) {
  if (attributes.normalizer < 0 || attributes.normalizer >= static_cast<int>(std::size(kNormalizers)))
    throw InputError("attribute normalizer is " + std::to_string(attributes.normalizer) + "; there is no such one");
  if (attributes.temperature_terms < 1 || attributes.temperature_terms > SHARP_MAX_TEMPERATURE_TERMS)
    throw InputError("attribute temperature_coefficients has " + std::to_string(attributes.temperature_terms) +
                     " numbers; it must have 1 to " + std::to_string(SHARP_MAX_TEMPERATURE_TERMS));
  for (const LimitsDefinition& limits : kLimits) {
    if ((limits.normalizer >= 0 && limits.normalizer != attributes.normalizer) || (limits.gpu && !gpu)) continue;
    const AttributeDefinition& attribute = kAttributes[limits.attribute];
    const double number = number_of(attributes, attribute);
    const bool above = limits.open ? number > limits.least : number >= limits.least;
    if (!above || !(number <= limits.most) || (!limits.infinite && std::isinf(number)))
      throw InputError("attribute " + std::string(attribute.name) + " is " + text_of(number) + "; it must be " +
                       limits.rule);
  }
}

void read_shapes(const InputShape* inputs, SharpPagedAttention& call) {
  read_all<Paged>(inputs, call);
  for (const int scale : {Paged::kKeyScale, Paged::kValueScale}) {
    const bool there = is_there(Paged::kInputs[scale], inputs[scale]);
    // A cache without blocks has scales without elements.
    if (has_scales(call.cache_type) && !inputs[scale].given)
      throw InputError(std::string(Paged::kInputs[scale].name) + " is missing; an int8 or fp8 cache needs it");
    if (has_scales(call.cache_type) && !there) read_shape<Paged>(Paged::kInputs[scale], inputs[scale], call);
    if (!has_scales(call.cache_type) && there)
      fail(Paged::kInputs[scale], inputs[scale], "it must be left out; only int8 and fp8 caches have scales");
  }
  check_sizes(call);
}

void read_shapes(const InputShape* inputs, SharpAttention& call) {
  using Op = Contiguous;
  const auto there = [&](Op::Input input) { return is_there(Op::kInputs[input], inputs[input]); };
  if (there(Op::kPastKey) != there(Op::kPastValue) || (there(Op::kPastLens) && !there(Op::kPastKey)))
    throw InputError("past_key and past_value must be given together, and past_lens only with them");
  read_all<Contiguous>(inputs, call);
  check_sizes(call);
}

void check_sizes(const SharpPagedAttention& call) {
  check_all_sizes<Paged>(call);
  if (call.cache_type < SHARP_FLOAT32 || call.cache_type > SHARP_FP8)
    throw InputError("there is no such type of cache");
  if (call.screened && (call.attributes.normalizer != SHARP_ENTMAX || has_scales(call.cache_type)))
    throw InputError("key_screen is given; only entmax over a cache of floats has one: leave it out");
  check_head_params_columns(call);
}

void check_sizes(const SharpAttention& call) {
  check_all_sizes<Contiguous>(call);
  if (!call.has_past && (call.capacity > 0 || call.shared))
    throw InputError("without past_key there is neither a capacity nor past_lens");
  // Whether a * b > kMost. The product itself may overflow.
  const auto too_many = [](int64_t a, int64_t b) { return a > 0 && b > kMost / a; };
  if (call.new_keys > kMost || call.capacity > kMost - std::max<int64_t>(call.new_keys, 0) ||
      too_many(call.batch, call.queries))
    throw InputError("the call has more than 2^31 - 1 keys in a sequence or queries in all; split it");
  check_head_params_columns(call);
}

void check_numbers(const SharpPagedAttention& call) {
  check_head_params(call);
  if (call.key_shift != nullptr)
    for (int64_t index = 0; index < call.kv_heads * call.head_dim; ++index)
      if (!(std::fabs(call.key_shift[index]) < 1e9f))
        throw InputError("key_shift[" + std::to_string(index / call.head_dim) + "][" +
                         std::to_string(index % call.head_dim) + "] is " + text_of(call.key_shift[index]) +
                         "; it must be a number between -1e9 and 1e9");
  const int64_t slots = call.blocks * call.block_size;
  for (int64_t token = 0; token < call.tokens; ++token)
    if (call.slot_mapping[token] < -1 || call.slot_mapping[token] >= slots)
      fail_element("slot_mapping", token, call.slot_mapping[token], between(-1, slots - 1));
  check_sequences(call);
}

void check_numbers(const SharpAttention& call) { check_head_params(call); }

Lengths read_lengths(const SharpAttention& call) {
  Lengths lengths;
  for (int64_t sequence = 0; sequence < call.batch; ++sequence) {
    const int64_t past = call.past_lens == nullptr ? call.capacity : call.past_lens[sequence];
    if (past < 0 || past > call.capacity)
      fail_element("past_lens", sequence, past, between(0, call.capacity) + " (capacity)");
    int64_t total = past + call.new_keys;
    if (call.total_lens != nullptr) {
      if (call.total_lens[sequence] < 0) fail_element("total_lens", sequence, call.total_lens[sequence], "0 or more");
      total = std::min<int64_t>(total, call.total_lens[sequence]);
    }
    if (call.past_lens != nullptr && total > call.capacity)
      throw InputError("past_lens[" + std::to_string(sequence) + "] is " + std::to_string(past) + ", and with " +
                       std::to_string(call.new_keys) + " new keys that is more than the buffer's " +
                       std::to_string(call.capacity) + " slots; make it larger, or leave keys out with total_lens");
    lengths.past.push_back(static_cast<int32_t>(past));
    lengths.total.push_back(static_cast<int32_t>(total));
  }
  return lengths;
}

}  // namespace sharp
