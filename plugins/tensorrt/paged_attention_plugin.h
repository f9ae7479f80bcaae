// ai.sharp::PagedAttention as a TensorRT plugin. The caches are updated in place if TensorRT lets an output alias its
// input (PreviewFeature::kALIASED_PLUGIN_IO_10_03); otherwise the caches are copied first.
//
// TensorRT asks for the number of outputs before it names any type, so the plugin has a version for each set of
// auxiliary cache tensors: 1 has none, 2 has scales, 3 has a key screen.
#pragma once

#include "plugin.h"

namespace sharp::tensorrt {

enum class Beside { kNothing, kScales, kScreen };

class PagedAttentionPlugin : public Plugin {
 public:
  static constexpr const char* kName = "PagedAttention";
  static constexpr const char* kVersions[] = {"1", "2", "3"};  // indexed by Beside

  PagedAttentionPlugin(Beside beside, const SharpAttributes& attributes, nvinfer1::TensorRTPhase phase,
                       SharpDevice device)
      : Plugin(kName, kVersions[static_cast<int>(beside)], kOutputCounts[static_cast<int>(beside)], attributes, phase,
               device),
        beside_(beside) {}

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
  static constexpr int32_t kOutputCounts[] = {4, 6, 5};

  bool takes(int32_t input_count, int32_t output_count) const;

  Beside beside_;
};

}  // namespace sharp::tensorrt
