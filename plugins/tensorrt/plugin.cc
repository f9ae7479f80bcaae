#include "plugin.h"

#include "log.h"

namespace sharp::tensorrt {

Plugin::Plugin(const char* name, const SharpAttributes& attributes)
    : attributes_(attributes), name_(name), description_(describe(attributes)), serialized_(attributes) {}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

int32_t Plugin::status_of(const std::function<void()>& work) const noexcept {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    log_error((std::string(name_) + ": " + error.what()).c_str());
    return 1;
  }
}

}  // namespace sharp::tensorrt
