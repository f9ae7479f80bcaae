#include "attention_plugin.h"

#include <initializer_list>

#include "tensors.h"

namespace sharp::tensorrt {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

enum Input {
  kQuery,
  kKey,
  kValue,
  kPastKey,
  kPastValue,
  kPastLens,
  kTotalLens,
  kHeadParams,
  kAlibiSlopes,
  kCollectStats,
  kInputCount
};
enum Output { kOutput, kPresentKey, kPresentValue, kStats };

constexpr int32_t kRequiredInputs = kValue + 1;
constexpr int32_t kRank = 4;  // of query, key, value and the past

// An optional input that is left out before a given one is an empty tensor [0]. A past of no keys is given: it has four
// dimensions.
bool is_given(Input input, const Dims* dims, int32_t count) {
  if (input >= count) return false;
  const bool past = input == kPastKey || input == kPastValue;
  return input < kRequiredInputs || (past && dims[input].nbDims == kRank) || elements(dims[input]) != 0;
}

bool is_shared(const Dims* dims, int32_t count) { return is_given(kPastLens, dims, count); }

void expect(const char* name, const Dims& dims, std::initializer_list<int64_t> sizes, const char* shape) {
  require_rank(name, dims, static_cast<int32_t>(sizes.size()));
  int32_t axis = 0;
  for (const int64_t size : sizes) {
    const int64_t there = dims.d[axis++];
    if (there >= 0 && size >= 0 && there != size) throw InputError(std::string(name) + " must be " + shape);
  }
}

// The sizes and type of a call, all inputs checked against each other; -1 where a size is not known yet.
SharpAttention sizes_of(const SharpAttributes& attributes, const Dims* dims, const DataType* types, int32_t count) {
  require_count(count, kRequiredInputs, kInputCount);
  const auto given = [&](Input input) { return is_given(input, dims, count) ? &dims[input] : nullptr; };
  require_rank("query", dims[kQuery], kRank);
  require_rank("key", dims[kKey], kRank);
  require_rank("value", dims[kValue], kRank);
  SharpAttention problem{};
  problem.attributes = attributes;
  problem.batch = dims[kQuery].d[0];
  problem.q_heads = dims[kQuery].d[1];
  problem.queries = dims[kQuery].d[2];
  problem.head_dim = dims[kQuery].d[3];
  problem.kv_heads = dims[kKey].d[1];
  problem.new_keys = dims[kKey].d[2];
  problem.value_dim = dims[kValue].d[3];
  problem.type = sharp_type(types[kQuery]);
  require(problem.q_heads > 0 && problem.kv_heads > 0 && problem.head_dim > 0 && problem.value_dim > 0,
          "heads, head_dim and value_dim must be fixed in the model");
  require(problem.q_heads % problem.kv_heads == 0, "kv_heads must divide q_heads");
  const int64_t batch = problem.batch, kv_heads = problem.kv_heads;
  expect("key", dims[kKey], {batch, kv_heads, problem.new_keys, problem.head_dim},
         "[batch, kv_heads, new_keys, head_dim]");
  expect("value", dims[kValue], {batch, kv_heads, problem.new_keys, problem.value_dim},
         "[batch, kv_heads, new_keys, value_dim]");
  const Dims *past_key = given(kPastKey), *past_value = given(kPastValue);
  require((past_key != nullptr) == (past_value != nullptr), "past_key and past_value must be given together");
  if (past_key != nullptr) {
    require_rank("past_key", *past_key, kRank);
    problem.capacity = past_key->d[2];
    expect("past_key", *past_key, {batch, kv_heads, -1, problem.head_dim}, "[batch, kv_heads, past, head_dim]");
    expect("past_value", *past_value, {batch, kv_heads, problem.capacity, problem.value_dim},
           "[batch, kv_heads, past, value_dim]");
  }
  problem.shared = is_shared(dims, count);
  require(!problem.shared || past_key != nullptr, "past_lens needs past_key and past_value, the buffer that it is of");
  // A past of no keys is the same as none, and may have no memory.
  problem.has_past = problem.shared || problem.capacity != 0;
  problem.has_presents = true;
  if (const Dims* lens = given(kPastLens)) expect("past_lens", *lens, {batch}, "[batch]");
  if (const Dims* lens = given(kTotalLens)) expect("total_lens", *lens, {batch}, "[batch]");
  read_head_inputs(problem, given(kHeadParams), given(kAlibiSlopes));
  return problem;
}

Dims known(const DimsExprs& expressions) {
  Dims dims{};
  dims.nbDims = expressions.nbDims;
  for (int32_t axis = 0; axis < dims.nbDims; ++axis)
    dims.d[axis] = expressions.d[axis]->isConstant() ? expressions.d[axis]->getConstantValue() : -1;
  return dims;
}

}  // namespace

nvinfer1::IPluginV3* AttentionPlugin::clone() noexcept {
  AttentionPlugin* copy = nullptr;
  status_of([&] {
    copy = new AttentionPlugin(attributes_, phase_, device_);
    copy->input_count_ = input_count_;
    copy->shared_ = shared_;
  });
  return copy;
}

int32_t AttentionPlugin::getOutputDataTypes(DataType* outputs, int32_t output_count, const DataType* inputs,
                                            int32_t input_count) const noexcept {
  if (output_count != kOutputCount || input_count < kRequiredInputs) return 1;
  outputs[kOutput] = outputs[kPresentKey] = outputs[kPresentValue] = inputs[kQuery];
  outputs[kStats] = DataType::kFLOAT;
  return 0;
}

int32_t AttentionPlugin::getOutputShapes(const DimsExprs* inputs, int32_t input_count, const DimsExprs*, int32_t,
                                         DimsExprs* outputs, int32_t output_count,
                                         nvinfer1::IExprBuilder& builder) noexcept {
  return status_of([&] {
    require_count(input_count, kRequiredInputs, kInputCount);
    require(output_count == kOutputCount, "it must have 4 outputs");
    Dims dims[kInputCount];
    for (int32_t input = 0; input < input_count; ++input) dims[input] = known(inputs[input]);
    for (const Input input : {kQuery, kKey, kValue})
      require(dims[input].nbDims == kRank, "query, key and value must have 4 dimensions");
    shared_ = is_shared(dims, input_count);
    outputs[kOutput] = outputs[kStats] = inputs[kQuery];
    outputs[kOutput].d[3] = inputs[kValue].d[3];
    outputs[kStats].d[3] = builder.constant(attributes_.stats_columns);
    const auto present = [&](Input fresh, Input past) {
      if (!is_given(past, dims, input_count)) return inputs[fresh];
      DimsExprs shape = inputs[past];
      require(shape.nbDims == kRank, "past_key and past_value must have 4 dimensions");
      if (!shared_)
        shape.d[2] = builder.operation(nvinfer1::DimensionOperation::kSUM, *shape.d[2], *inputs[fresh].d[2]);
      return shape;
    };
    outputs[kPresentKey] = present(kKey, kPastKey);
    outputs[kPresentValue] = present(kValue, kPastValue);
  });
}

bool AttentionPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors,
                                                int32_t input_count, int32_t output_count) noexcept {
  if (input_count < kRequiredInputs || input_count > kInputCount || output_count != kOutputCount) return false;
  const PluginTensorDesc& tensor = tensors[position].desc;
  if (tensor.format != nvinfer1::TensorFormat::kLINEAR) return false;
  const DataType type = tensor.type;
  const bool same = type == tensors[kQuery].desc.type;
  if (position >= input_count) return position - input_count == kStats ? type == DataType::kFLOAT : same;
  switch (position) {
    case kQuery:
      return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
    case kKey:
    case kValue:
      return same;
    case kPastKey:  // what stands for a past that is left out is float32 beside any type
    case kPastValue:
      return same || (type == DataType::kFLOAT && tensor.dims.nbDims != kRank);
    case kHeadParams:
    case kAlibiSlopes:
      return type == DataType::kFLOAT;
    case kCollectStats:  // 0 or 1: the kernels read the first byte
      return type == DataType::kBOOL || type == DataType::kINT32;
    default:
      return type == DataType::kINT32;
  }
}

int32_t AttentionPlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                         const DynamicPluginTensorDesc*, int32_t) noexcept {
  return status_of([&] {
    const Shapes<kInputCount> shapes(inputs, input_count, false);
    shared_ = sizes_of(attributes_, shapes.dims, shapes.types, input_count).shared;
    input_count_ = input_count;
    plan_for_device();
  });
}

size_t AttentionPlugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                         const DynamicPluginTensorDesc*, int32_t) const noexcept {
  size_t bytes = 0;
  status_of([&] {
    const Shapes<kInputCount> shapes(inputs, input_count, true);
    SharpAttention problem = sizes_of(attributes_, shapes.dims, shapes.types, input_count);
    problem.multiprocessors = device_.multiprocessors;
    check(sharp_cuda_attention_workspace_bytes(&problem, &bytes));
  });
  return bytes;
}

int32_t AttentionPlugin::getAliasedInput(int32_t output) noexcept {
  if (!shared_) return -1;
  if (output == kPresentKey) return kPastKey;
  return output == kPresentValue ? kPastValue : -1;
}

int32_t AttentionPlugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc*,
                                       int32_t) noexcept {
  return status_of([&] {
    const Shapes<kInputCount> shapes(inputs, input_count);
    SharpAttention problem = sizes_of(attributes_, shapes.dims, shapes.types, input_count);
    input_count_ = input_count;
    check_device();
    problem.multiprocessors = device_.multiprocessors;
    check(sharp_cuda_prepare_attention(&problem));
  });
}

int32_t AttentionPlugin::enqueue(const PluginTensorDesc* input_descriptions,
                                 const PluginTensorDesc* output_descriptions, const void* const* inputs,
                                 void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
  return status_of([&] {
    const Shapes<kInputCount> shapes(input_descriptions, input_count_);
    if (building()) return write_zeros(inputs, output_descriptions, outputs, stream);
    SharpAttention problem = sizes_of(attributes_, shapes.dims, shapes.types, input_count_);
    problem.multiprocessors = device_.multiprocessors;
    const auto optional = [&](Input input) {
      return is_given(input, shapes.dims, input_count_) ? inputs[input] : nullptr;
    };
    problem.query = inputs[kQuery];
    problem.key = inputs[kKey];
    problem.value = inputs[kValue];
    problem.past_key = problem.has_past ? inputs[kPastKey] : nullptr;
    problem.past_value = problem.has_past ? inputs[kPastValue] : nullptr;
    problem.past_lens = static_cast<const int32_t*>(optional(kPastLens));
    problem.total_lens = static_cast<const int32_t*>(optional(kTotalLens));
    problem.head_params = static_cast<const float*>(optional(kHeadParams));
    problem.alibi_slopes = static_cast<const float*>(optional(kAlibiSlopes));
    problem.collect_stats = static_cast<const uint8_t*>(optional(kCollectStats));
    problem.output = outputs[kOutput];
    problem.present_key = outputs[kPresentKey];
    problem.present_value = outputs[kPresentValue];
    problem.stats = static_cast<float*>(outputs[kStats]);
    check(sharp_cuda_attention(&problem, workspace, stream));
  });
}

}  // namespace sharp::tensorrt
