#include "attention_plugin.h"

#include "tensors.h"

namespace sharp::tensorrt {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

using Op = Contiguous;

constexpr int32_t kRequiredInputs = Op::kValue + 1;
constexpr int32_t kRank = 4;  // the rank of query, key, value and the past

// Returns a call without its buffers, with all inputs checked against each other; -1 for sizes not known yet.
SharpAttention call_of(const SharpAttributes& attributes, const Tensors& tensors) {
  require_count(static_cast<int32_t>(tensors.types.size()), kRequiredInputs, Op::kInputCount);
  SharpAttention call{};
  call.attributes = attributes;
  call.type = sharp_type(tensors.types[Op::kQuery]);
  read_shapes(tensors.shapes.data(), call);
  // A past without keys counts as no past, because it may have no memory.
  call.has_past = call.shared || call.capacity != 0;
  call.has_presents = true;
  return call;
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
  outputs[Op::kOutput] = outputs[Op::kPresentKey] = outputs[Op::kPresentValue] = inputs[Op::kQuery];
  outputs[Op::kStats] = DataType::kFLOAT;
  return 0;
}

int32_t AttentionPlugin::getOutputShapes(const DimsExprs* inputs, int32_t input_count, const DimsExprs*, int32_t,
                                         DimsExprs* outputs, int32_t output_count,
                                         nvinfer1::IExprBuilder& builder) noexcept {
  return status_of([&] {
    require_count(input_count, kRequiredInputs, Op::kInputCount);
    require(output_count == kOutputCount, "it must have 4 outputs");
    std::vector<InputShape> shapes(Op::kInputCount);
    for (int32_t input = 0; input < input_count; ++input) {
      const Dims dims = known(inputs[input]);
      shapes[input] = {true, {dims.d, dims.d + dims.nbDims}};
    }
    for (const Op::Input input : {Op::kQuery, Op::kKey, Op::kValue})
      require(shapes[input].sizes.size() == kRank, "query, key and value must have 4 dimensions");
    const auto there = [&](Op::Input input) { return is_there(Op::kInputs[input], shapes[input]); };
    shared_ = there(Op::kPastLens);
    outputs[Op::kOutput] = outputs[Op::kStats] = inputs[Op::kQuery];
    outputs[Op::kOutput].d[3] = inputs[Op::kValue].d[3];
    outputs[Op::kStats].d[3] = builder.constant(attributes_.stats_columns);
    const auto present = [&](Op::Input fresh, Op::Input past) {
      if (!there(past)) return inputs[fresh];
      DimsExprs shape = inputs[past];
      require(shape.nbDims == kRank, "past_key and past_value must have 4 dimensions");
      if (!shared_)
        shape.d[2] = builder.operation(nvinfer1::DimensionOperation::kSUM, *shape.d[2], *inputs[fresh].d[2]);
      return shape;
    };
    outputs[Op::kPresentKey] = present(Op::kKey, Op::kPastKey);
    outputs[Op::kPresentValue] = present(Op::kValue, Op::kPastValue);
  });
}

bool AttentionPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors,
                                                int32_t input_count, int32_t output_count) noexcept {
  if (input_count < kRequiredInputs || input_count > Op::kInputCount || output_count != kOutputCount) return false;
  const PluginTensorDesc& tensor = tensors[position].desc;
  if (tensor.format != nvinfer1::TensorFormat::kLINEAR) return false;
  const DataType type = tensor.type;
  const bool same = type == tensors[Op::kQuery].desc.type;
  if (position >= input_count) return position - input_count == Op::kStats ? type == DataType::kFLOAT : same;
  switch (position) {
    case Op::kQuery:
      return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
    case Op::kKey:
    case Op::kValue:
      return same;
    case Op::kPastKey:  // the empty tensor for an absent past is float32, whatever the type of the other inputs
    case Op::kPastValue:
      return same || (type == DataType::kFLOAT && tensor.dims.nbDims != kRank);
    default:
      return fits(Op::kInputs[position].type, type);
  }
}

int32_t AttentionPlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                         const DynamicPluginTensorDesc*, int32_t) noexcept {
  return status_of([&] {
    shared_ = call_of(attributes_, Tensors(inputs, input_count, Op::kInputCount, false)).shared;
    input_count_ = input_count;
    plan_for_device();
  });
}

size_t AttentionPlugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                         const DynamicPluginTensorDesc*, int32_t) const noexcept {
  size_t bytes = 0;
  status_of([&] {
    SharpAttention call = call_of(attributes_, Tensors(inputs, input_count, Op::kInputCount, true));
    call.multiprocessors = device_.multiprocessors;
    check(sharp_cuda_attention_workspace_bytes(&call, true, &bytes));
  });
  return bytes;
}

int32_t AttentionPlugin::getAliasedInput(int32_t output) noexcept {
  if (!shared_) return -1;
  if (output == Op::kPresentKey) return Op::kPastKey;
  return output == Op::kPresentValue ? Op::kPastValue : -1;
}

int32_t AttentionPlugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc*,
                                       int32_t) noexcept {
  return status_of([&] {
    SharpAttention call = call_of(attributes_, Tensors(inputs, input_count, Op::kInputCount));
    input_count_ = input_count;
    check_device();
    call.multiprocessors = device_.multiprocessors;
    check(sharp_cuda_prepare_attention(&call));
  });
}

int32_t AttentionPlugin::enqueue(const PluginTensorDesc* input_descriptions,
                                 const PluginTensorDesc* output_descriptions, const void* const* inputs,
                                 void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
  return status_of([&] {
    if (building()) return write_zeros(inputs, output_descriptions, outputs, stream);
    const Tensors tensors(input_descriptions, input_count_, Op::kInputCount);
    SharpAttention call = call_of(attributes_, tensors);
    call.multiprocessors = device_.multiprocessors;
    set_inputs<Op>(tensors, inputs, call);
    if (!call.has_past) call.past_key = call.past_value = nullptr;
    call.output = outputs[Op::kOutput];
    call.present_key = outputs[Op::kPresentKey];
    call.present_value = outputs[Op::kPresentValue];
    call.stats = static_cast<float*>(outputs[Op::kStats]);
    check(sharp_cuda_attention(&call, workspace, stream));
  });
}

}  // namespace sharp::tensorrt
