#include "paged_attention_plugin.h"

#include "tensors.h"

namespace sharp::tensorrt {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

enum Input {
  kQuery,
  kKey,
  kValue,
  kKeyCache,
  kValueCache,
  kSlotMapping,
  kBlockTable,
  kQueryStart,
  kContextLens,
  kHeadParams,
  kAlibiSlopes,
  kCollectStats,
  kKeyScale,
  kValueScale,
  kKeyScreen,
  kKeyShift,
  kInputCount
};
enum Output { kOutput, kKeyCacheOut, kValueCacheOut, kStats, kKeyScaleOut, kValueScaleOut };
constexpr int32_t kKeyScreenOut = kKeyScaleOut;  // a cache with a screen has no scales

constexpr const char* kInputNames[] = {"query",        "key",          "value",        "key_cache",
                                       "value_cache",  "slot_mapping", "block_table",  "query_start",
                                       "context_lens", "head_params",  "alibi_slopes", "collect_stats",
                                       "key_scale",    "value_scale",  "key_screen",   "key_shift"};
constexpr int32_t kRequiredInputs = kContextLens + 1;
constexpr int32_t kRanks[kInputCount] = {3, 3, 3, 4, 4, 1, 2, 1, 1, -1, -1, -1, -1, -1, 3, -1};

// How many inputs a node may have, by Beside: optional ones may be missing at the end, auxiliary tensors are last.
constexpr int32_t kLeastInputs[] = {kRequiredInputs, kKeyScreen, kKeyShift};
constexpr int32_t kMostInputs[] = {kKeyScale, kKeyScreen, kInputCount};

// An optional input that is left out before a given one is an empty tensor.
bool is_given(Input input, const Dims* dims, int32_t count) {
  return input < count && (input < kRequiredInputs || elements(dims[input]) != 0);
}

// The sizes and types of a call, all inputs checked against each other; -1 where a size is not known yet.
SharpPagedAttention sizes_of(Beside beside, const SharpAttributes& attributes, const Dims* dims, const DataType* types,
                             int32_t count) {
  require_count(count, kLeastInputs[static_cast<int>(beside)], kMostInputs[static_cast<int>(beside)]);
  for (int32_t input = 0; input < count; ++input)
    if (kRanks[input] >= 0) require_rank(kInputNames[input], dims[input], kRanks[input]);
  SharpPagedAttention problem{};
  problem.attributes = attributes;
  problem.tokens = dims[kQuery].d[0];
  problem.q_heads = dims[kQuery].d[1];
  problem.head_dim = dims[kQuery].d[2];
  problem.value_dim = dims[kValue].d[2];
  problem.blocks = dims[kKeyCache].d[0];
  problem.kv_heads = dims[kKeyCache].d[1];
  problem.block_size = dims[kKeyCache].d[3];
  problem.sequences = dims[kBlockTable].d[0];
  problem.max_blocks = dims[kBlockTable].d[1];
  problem.type = sharp_type(types[kQuery]);
  problem.cache_type = sharp_type(types[kKeyCache]);
  require(problem.q_heads > 0 && problem.kv_heads > 0 && problem.head_dim > 0 && problem.value_dim > 0 &&
              problem.block_size > 0,
          "heads, head_dim, value_dim and block_size must be fixed in the model");
  require(problem.q_heads % problem.kv_heads == 0, "kv_heads must divide q_heads");
  require(dims[kKey].d[1] == problem.kv_heads && dims[kValue].d[1] == problem.kv_heads &&
              dims[kValueCache].d[1] == problem.kv_heads,
          "key, value and both caches must have the same number of heads");
  require(dims[kKey].d[2] == problem.head_dim && dims[kKeyCache].d[2] == problem.head_dim,
          "query, key and key_cache must have the same head_dim");
  require(dims[kValueCache].d[2] == problem.block_size && dims[kValueCache].d[3] == problem.value_dim,
          "value_cache must be [blocks, kv_heads, block_size, value_dim]");
  if (beside == Beside::kScales)
    for (const Input scale : {kKeyScale, kValueScale})
      require(dims[scale].nbDims == 2 && dims[scale].d[0] == problem.blocks && dims[scale].d[1] == problem.kv_heads,
              "key_scale and value_scale must be [blocks, kv_heads]");
  if (beside == Beside::kScreen) {
    problem.screened = true;
    const Dims& screen = dims[kKeyScreen];
    require(screen.d[0] == problem.blocks && screen.d[1] == problem.kv_heads &&
                screen.d[2] == problem.block_size * ((problem.head_dim + 3) / 4 * 4 + 8),
            "key_screen must be [blocks, kv_heads, block_size * (head_dim rounded up to 4, and 8)]");
    require(
        !is_given(kKeyShift, dims, count) || (dims[kKeyShift].nbDims == 2 && dims[kKeyShift].d[0] == problem.kv_heads &&
                                              dims[kKeyShift].d[1] == problem.head_dim),
        "key_shift must be [kv_heads, head_dim]");
  }
  const auto given = [&](Input input) { return is_given(input, dims, count) ? &dims[input] : nullptr; };
  read_head_inputs(problem, given(kHeadParams), given(kAlibiSlopes));
  return problem;
}

}  // namespace

bool PagedAttentionPlugin::takes(int32_t input_count, int32_t output_count) const {
  const int beside = static_cast<int>(beside_);
  return input_count >= kLeastInputs[beside] && input_count <= kMostInputs[beside] && output_count == output_count_;
}

nvinfer1::IPluginV3* PagedAttentionPlugin::clone() noexcept {
  PagedAttentionPlugin* copy = nullptr;
  status_of([&] {
    copy = new PagedAttentionPlugin(beside_, attributes_, phase_, device_);
    copy->input_count_ = input_count_;
  });
  return copy;
}

int32_t PagedAttentionPlugin::getOutputDataTypes(DataType* outputs, int32_t output_count, const DataType* inputs,
                                                 int32_t input_count) const noexcept {
  if (!takes(input_count, output_count)) return 1;
  outputs[kOutput] = inputs[kQuery];
  outputs[kKeyCacheOut] = inputs[kKeyCache];
  outputs[kValueCacheOut] = inputs[kValueCache];
  for (int32_t output = kStats; output < output_count; ++output) outputs[output] = DataType::kFLOAT;
  if (beside_ == Beside::kScreen) outputs[kKeyScreenOut] = DataType::kINT8;
  return 0;
}

int32_t PagedAttentionPlugin::getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t input_count,
                                              const nvinfer1::DimsExprs*, int32_t, nvinfer1::DimsExprs* outputs,
                                              int32_t output_count, nvinfer1::IExprBuilder& builder) noexcept {
  if (!takes(input_count, output_count)) return 1;
  outputs[kOutput] = inputs[kQuery];
  outputs[kOutput].d[2] = inputs[kValue].d[2];
  outputs[kKeyCacheOut] = inputs[kKeyCache];
  outputs[kValueCacheOut] = inputs[kValueCache];
  outputs[kStats] = inputs[kQuery];
  outputs[kStats].d[2] = builder.constant(attributes_.stats_columns);
  if (beside_ == Beside::kScreen) outputs[kKeyScreenOut] = inputs[kKeyScreen];
  if (beside_ == Beside::kScales) {
    outputs[kKeyScaleOut] = inputs[kKeyScale];
    outputs[kValueScaleOut] = inputs[kValueScale];
  }
  return 0;
}

bool PagedAttentionPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors,
                                                     int32_t input_count, int32_t output_count) noexcept {
  if (!takes(input_count, output_count)) return false;
  const PluginTensorDesc& tensor = tensors[position].desc;
  if (tensor.format != nvinfer1::TensorFormat::kLINEAR) return false;
  const DataType type = tensor.type;
  const auto is = [&](int32_t other) { return type == tensors[other].desc.type; };
  if (position >= input_count) {
    const int32_t output = position - input_count;
    if (output == kKeyScreenOut && beside_ == Beside::kScreen) return type == DataType::kINT8;
    if (output >= kStats) return type == DataType::kFLOAT;
    return is(output == kOutput ? kQuery : output == kKeyCacheOut ? kKeyCache : kValueCache);
  }
  switch (position) {
    case kQuery:
      return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
    case kKey:
    case kValue:
      return is(kQuery);
    case kKeyCache:  // float32 queries may have a cache of half the size
      if (beside_ == Beside::kScales) return has_scales(type);
      return is(kQuery) ||
             (tensors[kQuery].desc.type == DataType::kFLOAT && (type == DataType::kHALF || type == DataType::kBF16));
    case kValueCache:
      return is(kKeyCache);
    case kHeadParams:
    case kAlibiSlopes:
    case kKeyScale:
    case kValueScale:
    case kKeyShift:
      return type == DataType::kFLOAT;
    case kKeyScreen:
      return type == DataType::kINT8;
    case kCollectStats:  // 0 or 1: the kernels read the first byte
      return type == DataType::kBOOL || type == DataType::kINT32;
    default:
      return type == DataType::kINT32;
  }
}

int32_t PagedAttentionPlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                              const DynamicPluginTensorDesc*, int32_t) noexcept {
  return status_of([&] {
    const Shapes<kInputCount> shapes(inputs, input_count, false);
    sizes_of(beside_, attributes_, shapes.dims, shapes.types, input_count);
    input_count_ = input_count;
    plan_for_device();
  });
}

size_t PagedAttentionPlugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                              const DynamicPluginTensorDesc*, int32_t) const noexcept {
  size_t bytes = 0;
  status_of([&] {
    const Shapes<kInputCount> shapes(inputs, input_count, true);
    SharpPagedAttention problem = sizes_of(beside_, attributes_, shapes.dims, shapes.types, input_count);
    problem.multiprocessors = device_.multiprocessors;
    check(sharp_cuda_workspace_bytes(&problem, &bytes));
  });
  return bytes;
}

int32_t PagedAttentionPlugin::getAliasedInput(int32_t output) noexcept {
  switch (output) {
    case kKeyCacheOut:
      return kKeyCache;
    case kValueCacheOut:
      return kValueCache;
    case kKeyScaleOut:
      return beside_ == Beside::kScales ? kKeyScale : beside_ == Beside::kScreen ? kKeyScreen : -1;
    case kValueScaleOut:
      return beside_ == Beside::kScales ? kValueScale : -1;
    default:
      return -1;
  }
}

int32_t PagedAttentionPlugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count,
                                            const PluginTensorDesc*, int32_t) noexcept {
  return status_of([&] {
    const Shapes<kInputCount> shapes(inputs, input_count);
    SharpPagedAttention problem = sizes_of(beside_, attributes_, shapes.dims, shapes.types, input_count);
    input_count_ = input_count;
    check_device();
    problem.multiprocessors = device_.multiprocessors;
    check(sharp_cuda_prepare(&problem));
  });
}

int32_t PagedAttentionPlugin::enqueue(const PluginTensorDesc* input_descriptions,
                                      const PluginTensorDesc* output_descriptions, const void* const* inputs,
                                      void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
  return status_of([&] {
    const Shapes<kInputCount> shapes(input_descriptions, input_count_);
    if (building()) return write_zeros(inputs, output_descriptions, outputs, stream);
    SharpPagedAttention problem = sizes_of(beside_, attributes_, shapes.dims, shapes.types, input_count_);
    problem.multiprocessors = device_.multiprocessors;
    const auto updated = [&](Input cache, int32_t to) {
      const size_t bytes = elements(shapes.dims[cache]) * bytes_of(shapes.types[cache]);
      if (outputs[to] != inputs[cache]) check(sharp_cuda_copy(outputs[to], inputs[cache], bytes, stream));
      return outputs[to];
    };
    const auto optional = [&](Input input) {
      return is_given(input, shapes.dims, input_count_) ? inputs[input] : nullptr;
    };
    problem.query = inputs[kQuery];
    problem.key = inputs[kKey];
    problem.value = inputs[kValue];
    problem.key_cache = updated(kKeyCache, kKeyCacheOut);
    problem.value_cache = updated(kValueCache, kValueCacheOut);
    if (beside_ == Beside::kScreen) {
      problem.key_screen = updated(kKeyScreen, kKeyScreenOut);
      problem.key_shift = static_cast<const float*>(optional(kKeyShift));
    }
    if (beside_ == Beside::kScales) {
      problem.key_scale = static_cast<float*>(updated(kKeyScale, kKeyScaleOut));
      problem.value_scale = static_cast<float*>(updated(kValueScale, kValueScaleOut));
    }
    problem.slot_mapping = static_cast<const int32_t*>(inputs[kSlotMapping]);
    problem.block_table = static_cast<const int32_t*>(inputs[kBlockTable]);
    problem.query_start = static_cast<const int32_t*>(inputs[kQueryStart]);
    problem.context_lens = static_cast<const int32_t*>(inputs[kContextLens]);
    problem.head_params = static_cast<const float*>(optional(kHeadParams));
    problem.alibi_slopes = static_cast<const float*>(optional(kAlibiSlopes));
    problem.collect_stats = static_cast<const uint8_t*>(optional(kCollectStats));
    problem.output = outputs[kOutput];
    problem.stats = static_cast<float*>(outputs[kStats]);
    check(sharp_cuda_paged_attention(&problem, workspace, stream));
  });
}

}  // namespace sharp::tensorrt
