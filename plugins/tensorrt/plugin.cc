#include "plugin.h"

#include <algorithm>

#include "log.h"
#include "tensors.h"

namespace sharp::tensorrt {
namespace {

std::string capability_name(SharpDevice device) {
  return std::to_string(device.compute_capability / 10) + "." + std::to_string(device.compute_capability % 10);
}

}  // namespace

Plugin::Plugin(const char* name, const char* version, int32_t output_count, const SharpAttributes& attributes,
               nvinfer1::TensorRTPhase phase, SharpDevice device)
    : output_count_(output_count),
      attributes_(attributes),
      phase_(phase),
      device_(device),
      name_(name),
      version_(version),
      description_(describe(attributes)),
      serialized_(attributes, device) {}

const nvinfer1::PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
  return status_of([&] { plan_for_device(); }) == 0 ? serialized_.collection() : nullptr;
}

void Plugin::plan_for_device() {
  if (device_.multiprocessors == 0) check(sharp_cuda_device(&device_));
  serialized_.set_device(device_);
}

void Plugin::check_device() const {
  if (device_.compute_capability == 0) return;
  SharpDevice here;
  check(sharp_cuda_device(&here));
  if (here.compute_capability != device_.compute_capability)
    throw InputError("the engine was built on a GPU of compute capability " + capability_name(device_) +
                     ", and this one has " + capability_name(here) + "; build it again here");
}

void Plugin::write_zeros(const void* const* inputs, const nvinfer1::PluginTensorDesc* descriptions,
                         void* const* outputs, cudaStream_t stream) const {
  for (int32_t output = 0; output < output_count_; ++output) {
    void* to = outputs[output];
    if (to != nullptr && std::find(inputs, inputs + input_count_, to) == inputs + input_count_)
      check(sharp_cuda_zero(to, elements(descriptions[output].dims) * bytes_of(descriptions[output].type), stream));
  }
}

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
