// A node's attributes as TensorRT's plugin fields, and back.
#pragma once

#include <NvInferRuntime.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "sharp_cuda.h"

namespace sharp::tensorrt {

// What a node got wrong, in one sentence.
class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The fields that the parser of ONNX models reads for us, with the types of their values.
const nvinfer1::PluginFieldCollection* field_names();

// Throws InputError. Fields of other names are left alone: nodes carry plugin_version and plugin_namespace too.
SharpAttributes read_fields(const nvinfer1::PluginFieldCollection& fields);

// The GPU that an engine was built on; zeros where the fields do not say.
SharpDevice read_device(const nvinfer1::PluginFieldCollection& fields);

// Owns what its fields point at; read_fields and read_device give the same again.
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
  std::string normalizer_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_;
};

// All attributes in one line, floats exactly; equal attributes give equal text.
std::string describe(const SharpAttributes& attributes);

}  // namespace sharp::tensorrt
