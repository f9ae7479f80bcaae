// Conversion between a node's attributes and TensorRT's plugin fields.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "check.h"
#include "sharp_cuda.h"

namespace sharp::tensorrt {

// Returns the fields that TensorRT's ONNX parser must read for the plugin, with the types of their values.
const nvinfer1::PluginFieldCollection* field_names();

// Reads the attributes. Other fields, such as plugin_version and plugin_namespace, are ignored. Throws InputError.
SharpAttributes read_fields(const nvinfer1::PluginFieldCollection& fields);

// Reads the GPU that an engine was built on; zeros if the fields do not have it.
SharpDevice read_device(const nvinfer1::PluginFieldCollection& fields);

// Plugin fields that own their values; read_fields and read_device restore the attributes and the device.
class SerializedFields {
 public:
  SerializedFields(const SharpAttributes& attributes, SharpDevice device);
  SerializedFields(const SerializedFields&) = delete;
  SerializedFields& operator=(const SerializedFields&) = delete;
  void set_device(SharpDevice device) { device_ = device; }
  const nvinfer1::PluginFieldCollection* collection() const { return &collection_; }

 private:
  SharpAttributes attributes_;
  SharpDevice device_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_;
};

// Returns all attributes in one line, floats exactly, so that equal attributes give equal text.
std::string describe(const SharpAttributes& attributes);

}  // namespace sharp::tensorrt
