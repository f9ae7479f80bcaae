#include "paged_attention_plugin.h"

#include "tensors.h"

namespace sharp::tensorrt {
namespace {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

using Op = Paged;

constexpr int32_t kRequiredInputs = Op::kContextLens + 1;
constexpr int32_t kKeyScaleOut = Op::kKeyScaleOut, kValueScaleOut = Op::kValueScaleOut;
constexpr int32_t kKeyScreenOut = kKeyScaleOut;  // the scale's index, as a cache with a screen has no scales

// The minimum number of inputs, by Beside: optional inputs may be missing at the end; auxiliary tensors are last.
constexpr int32_t kLeastInputs[] = {kRequiredInputs, Op::kKeyScreen, Op::kKeyShift};
constexpr int32_t kMostInputs[] = {Op::kKeyScale, Op::kKeyScreen, Op::kInputCount};

bool has_scales(DataType type) { return sharp::has_scales(sharp_type(type)); }

// Returns a call without its buffers, with all inputs checked against each other; -1 for sizes not known yet.
SharpPagedAttention call_of(Beside beside, const SharpAttributes& attributes, const Tensors& tensors) {
  require_count(static_cast<int32_t>(tensors.types.size()), kLeastInputs[static_cast<int>(beside)],
                kMostInputs[static_cast<int>(beside)]);
  SharpPagedAttention call{};
  call.attributes = attributes;
  call.type = sharp_type(tensors.types[Op::kQuery]);
  call.cache_type = sharp_type(tensors.types[Op::kKeyCache]);
  read_shapes(tensors.shapes.data(), call);
  return call;
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
  outputs[Op::kOutput] = inputs[Op::kQuery];
  outputs[Op::kKeyCacheOut] = inputs[Op::kKeyCache];
  outputs[Op::kValueCacheOut] = inputs[Op::kValueCache];
  for (int32_t output = Op::kStats; output < output_count; ++output) outputs[output] = DataType::kFLOAT;
  if (beside_ == Beside::kScreen) outputs[kKeyScreenOut] = DataType::kINT8;
  return 0;
}

int32_t PagedAttentionPlugin::getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t input_count,
                                              const nvinfer1::DimsExprs*, int32_t, nvinfer1::DimsExprs* outputs,
                                              int32_t output_count, nvinfer1::IExprBuilder& builder) noexcept {
  if (!takes(input_count, output_count)) return 1;
  outputs[Op::kOutput] = inputs[Op::kQuery];
  outputs[Op::kOutput].d[2] = inputs[Op::kValue].d[2];
  outputs[Op::kKeyCacheOut] = inputs[Op::kKeyCache];
  outputs[Op::kValueCacheOut] = inputs[Op::kValueCache];
  outputs[Op::kStats] = inputs[Op::kQuery];
  outputs[Op::kStats].d[2] = builder.constant(attributes_.stats_columns);
  if (beside_ == Beside::kScreen) outputs[kKeyScreenOut] = inputs[Op::kKeyScreen];
  if (beside_ == Beside::kScales) {
    outputs[kKeyScaleOut] = inputs[Op::kKeyScale];
    outputs[kValueScaleOut] = inputs[Op::kValueScale];
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
    if (output >= Op::kStats) return type == DataType::kFLOAT;
    return is(output == Op::kOutput ? Op::kQuery : output == Op::kKeyCacheOut ? Op::kKeyCache : Op::kValueCache);
  }
  switch (position) {
    case Op::kQuery:
      return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
    case Op::kKey:
    case Op::kValue:
      return is(Op::kQuery);
    case Op::kKeyCache:  // with float32 queries the cache may also have a 16-bit type
      if (beside_ == Beside::kScales) return has_scales(type);
      return is(Op::kQuery) || (tensors[Op::kQuery].desc.type == DataType::kFLOAT &&
                                (type == DataType::kHALF || type == DataType::kBF16));
    case Op::kValueCache:
      return is(Op::kKeyCache);
    default:
      return fits(Op::kInputs[position].type, type);
  }
}

int32_t PagedAttentionPlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                              const DynamicPluginTensorDesc*, int32_t) noexcept {
  return status_of([&] {
    call_of(beside_, attributes_, Tensors(inputs, input_count, Op::kInputCount, false));
    input_count_ = input_count;
    plan_for_device();
  });
}

size_t PagedAttentionPlugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                              const DynamicPluginTensorDesc*, int32_t) const noexcept {
  size_t bytes = 0;
  status_of([&] {
    SharpPagedAttention call = call_of(beside_, attributes_, Tensors(inputs, input_count, Op::kInputCount, true));
    call.multiprocessors = device_.multiprocessors;
    check(sharp_cuda_workspace_bytes(&call, true, &bytes));
  });
  return bytes;
}

int32_t PagedAttentionPlugin::getAliasedInput(int32_t output) noexcept {
  switch (output) {
    case Op::kKeyCacheOut:
      return Op::kKeyCache;
    case Op::kValueCacheOut:
      return Op::kValueCache;
    case kKeyScaleOut:
      return beside_ == Beside::kScales ? Op::kKeyScale : beside_ == Beside::kScreen ? Op::kKeyScreen : -1;
    case kValueScaleOut:
      return beside_ == Beside::kScales ? Op::kValueScale : -1;
    default:
      return -1;
  }
}

int32_t PagedAttentionPlugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count,
                                            const PluginTensorDesc*, int32_t) noexcept {
  return status_of([&] {
    SharpPagedAttention call = call_of(beside_, attributes_, Tensors(inputs, input_count, Op::kInputCount));
    input_count_ = input_count;
    check_device();
    call.multiprocessors = device_.multiprocessors;
    check(sharp_cuda_prepare(&call));
  });
}

int32_t PagedAttentionPlugin::enqueue(const PluginTensorDesc* input_descriptions,
                                      const PluginTensorDesc* output_descriptions, const void* const* inputs,
                                      void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
  return status_of([&] {
    if (building()) return write_zeros(inputs, output_descriptions, outputs, stream);
    const Tensors tensors(input_descriptions, input_count_, Op::kInputCount);
    SharpPagedAttention call = call_of(beside_, attributes_, tensors);
    call.multiprocessors = device_.multiprocessors;
    set_inputs<Op>(tensors, inputs, call);
    const auto updated = [&](Op::Input cache, int32_t to) {
      const size_t bytes = elements(input_descriptions[cache].dims) * bytes_of(input_descriptions[cache].type);
      if (outputs[to] != inputs[cache]) check(sharp_cuda_copy(outputs[to], inputs[cache], bytes, stream));
      return outputs[to];
    };
    call.key_cache = updated(Op::kKeyCache, Op::kKeyCacheOut);
    call.value_cache = updated(Op::kValueCache, Op::kValueCacheOut);
    if (beside_ == Beside::kScreen) call.key_screen = static_cast<int8_t*>(updated(Op::kKeyScreen, kKeyScreenOut));
    if (beside_ == Beside::kScales) {
      call.key_scale = static_cast<float*>(updated(Op::kKeyScale, kKeyScaleOut));
      call.value_scale = static_cast<float*>(updated(Op::kValueScale, kValueScaleOut));
    }
    call.output = outputs[Op::kOutput];
    call.stats = static_cast<float*>(outputs[Op::kStats]);
    check(sharp_cuda_paged_attention(&call, workspace, stream));
  });
}

}  // namespace sharp::tensorrt
