// The base of both plugins: a node's attributes, and the methods of TensorRT that depend only on them.
#pragma once

#include <NvInferRuntime.h>

#include <functional>
#include <string>

#include "attributes.h"

namespace sharp::tensorrt {

constexpr const char* kPluginNamespace = "";

class Plugin : public nvinfer1::IPluginV3,
               public nvinfer1::IPluginV3OneCore,
               public nvinfer1::IPluginV3OneBuildV2,
               public nvinfer1::IPluginV3OneRuntime {
 public:
  // While TensorRT builds an engine, `phase` is kBUILD. The inputs are then made up, and enqueue only writes zeros.
  // `device` is the GPU that the engine was built on, zeros while it is not known.
  Plugin(const char* name, const char* version, int32_t output_count, const SharpAttributes& attributes,
         nvinfer1::TensorRTPhase phase, SharpDevice device);

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  const char* getPluginName() const noexcept override { return name_; }
  const char* getPluginVersion() const noexcept override { return version_; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }
  // Counts also outputs that a node leaves out, because TensorRT's parser needs a name for every output.
  int32_t getNbOutputs() const noexcept override { return output_count_; }
  const char* getTimingCacheID() noexcept override { return description_.c_str(); }
  const char* getMetadataString() noexcept override { return description_.c_str(); }
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

 protected:
  // Runs `work` and returns TensorRT's status: 0, or 1 with the reason in the log.
  int32_t status_of(const std::function<void()>& work) const noexcept;

  // Stores the current device as the device to plan for, unless one is stored already. Throws.
  void plan_for_device();

  // Throws unless memory that was sized on the device of the build is enough on the current device.
  void check_device() const;

  bool building() const { return phase_ == nvinfer1::TensorRTPhase::kBUILD; }

  // Writes zeros into the outputs that do not alias an input. Throws.
  void write_zeros(const void* const* inputs, const nvinfer1::PluginTensorDesc* descriptions, void* const* outputs,
                   cudaStream_t stream) const;

  int32_t output_count_;
  SharpAttributes attributes_;
  nvinfer1::TensorRTPhase phase_;
  SharpDevice device_;
  int32_t input_count_ = 0;  // known from onShapeChange on, because optional inputs may be missing at the end

 private:
  const char *name_, *version_;
  std::string description_;
  SerializedFields serialized_;
};

}  // namespace sharp::tensorrt
