// What both plugins share: a node's attributes, and the methods of TensorRT that follow from them alone.
#pragma once

#include <NvInferRuntime.h>

#include <functional>
#include <string>

#include "attributes.h"

namespace sharp::tensorrt {

constexpr const char* kPluginVersion = "1";
constexpr const char* kPluginNamespace = "";

class Plugin : public nvinfer1::IPluginV3,
               public nvinfer1::IPluginV3OneCore,
               public nvinfer1::IPluginV3OneBuildV2,
               public nvinfer1::IPluginV3OneRuntime {
 public:
  Plugin(const char* name, const SharpAttributes& attributes);

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  const char* getPluginName() const noexcept override { return name_; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }
  // Outputs that a node leaves out, too: TensorRT's parser wants a name for every output that a plugin has.
  int32_t getNbOutputs() const noexcept override { return kOutputCount; }
  const char* getTimingCacheID() noexcept override { return description_.c_str(); }
  const char* getMetadataString() noexcept override { return description_.c_str(); }
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override { return serialized_.collection(); }

 protected:
  static constexpr int32_t kOutputCount = 4;

  // TensorRT's status: 0, or 1 with the reason in the log.
  int32_t status_of(const std::function<void()>& work) const noexcept;

  SharpAttributes attributes_;
  int32_t input_count_ = 0;  // optional inputs may be missing at the end; known from onShapeChange on

 private:
  const char* name_;
  std::string description_;
  SerializedFields serialized_;
};

}  // namespace sharp::tensorrt
