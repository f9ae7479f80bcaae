// ai.sharp::SharpAttention as a TensorRT plugin. In the shared-buffer form the past is updated in place if TensorRT
// lets an output alias its input (PreviewFeature::kALIASED_PLUGIN_IO_10_03); otherwise the past is copied first.
#pragma once

#include "plugin.h"

namespace sharp::tensorrt {

class AttentionPlugin : public Plugin {
 public:
  static constexpr const char *kName = "SharpAttention", *kVersion = "1";
  static constexpr int32_t kOutputCount = 4;

  AttentionPlugin(const SharpAttributes& attributes, nvinfer1::TensorRTPhase phase, SharpDevice device)
      : Plugin(kName, kVersion, kOutputCount, attributes, phase, device) {}

  nvinfer1::IPluginV3* clone() noexcept override;
  int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t output_count, const nvinfer1::DataType* inputs,
                             int32_t input_count) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t input_count, const nvinfer1::DimsExprs* shapes,
                          int32_t shape_count, nvinfer1::DimsExprs* outputs, int32_t output_count,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors,
                                 int32_t input_count, int32_t output_count) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t input_count,
                          const nvinfer1::DynamicPluginTensorDesc* outputs, int32_t output_count) noexcept override;
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t input_count,
                          const nvinfer1::DynamicPluginTensorDesc* outputs,
                          int32_t output_count) const noexcept override;
  int32_t getAliasedInput(int32_t output) noexcept override;

  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t input_count,
                        const nvinfer1::PluginTensorDesc* outputs, int32_t output_count) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descriptions,
                  const nvinfer1::PluginTensorDesc* output_descriptions, const void* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;

 private:
  // Whether past_lens is given. getAliasedInput sees no inputs, so getOutputShapes (called when the network's tensors
  // are made) and configurePlugin record it, and clones keep it. Without either call nothing is aliased, and enqueue
  // copies the buffer.
  bool shared_ = false;
};

}  // namespace sharp::tensorrt
