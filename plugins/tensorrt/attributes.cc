#include "attributes.h"

#include <cmath>
#include <cstring>
#include <sstream>

namespace sharp::tensorrt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

const PluginField* find(const nvinfer1::PluginFieldCollection& fields, const char* name) {
  for (int32_t index = 0; index < fields.nbFields; ++index)
    if (std::strcmp(fields.fields[index].name, name) == 0) return &fields.fields[index];
  return nullptr;
}

std::string read_text(const PluginField& field) {
  if (field.type != PluginFieldType::kCHAR)
    throw InputError(std::string("attribute ") + field.name + " must be a string");
  const std::string text(static_cast<const char*>(field.data), field.length);
  return text.substr(0, text.find('\0'));  // the parser counts the terminating zero, too
}

double read_number(const PluginField& field, int32_t index = 0) {
  if (field.length > index) {
    if (field.type == PluginFieldType::kFLOAT32) return static_cast<const float*>(field.data)[index];
    if (field.type == PluginFieldType::kFLOAT64) return static_cast<const double*>(field.data)[index];
    if (field.type == PluginFieldType::kINT32) return static_cast<const int32_t*>(field.data)[index];
    if (field.type == PluginFieldType::kINT64)
      return static_cast<double>(static_cast<const int64_t*>(field.data)[index]);
  }
  throw InputError(std::string("attribute ") + field.name + " must be a number");
}

double optional_number(const nvinfer1::PluginFieldCollection& fields, const char* name) {
  const PluginField* field = find(fields, name);
  return field == nullptr ? 0 : read_number(*field);
}

}  // namespace

const nvinfer1::PluginFieldCollection* field_names() {
  static const std::vector<PluginField> fields = [] {
    std::vector<PluginField> made;
    for (const AttributeDefinition& attribute : kAttributes)
      made.push_back({attribute.name, nullptr,
                      attribute.type == AttributeType::kString ? PluginFieldType::kCHAR
                      : attribute.type == AttributeType::kInt  ? PluginFieldType::kINT32
                                                               : PluginFieldType::kFLOAT32,
                      1});
    return made;
  }();
  static const nvinfer1::PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
  return &collection;
}

SharpAttributes read_fields(const nvinfer1::PluginFieldCollection& fields) {
  SharpAttributes attributes = default_attributes();
  for (const AttributeDefinition& attribute : kAttributes) {
    const PluginField* field = find(fields, attribute.name);  // older engines lack the newest fields
    if (field == nullptr) {
      if (attribute.type != AttributeType::kFloats && std::isnan(attribute.fallback))
        throw InputError(std::string("attribute ") + attribute.name + " is missing; every node must have it");
    } else if (attribute.type == AttributeType::kString) {
      attributes.normalizer = normalizer_named(read_text(*field));
    } else if (attribute.type == AttributeType::kFloats) {
      std::vector<float> coefficients;
      for (int32_t index = 0; index < field->length; ++index)
        coefficients.push_back(static_cast<float>(read_number(*field, index)));
      set_coefficients(attributes, coefficients.data(), field->length);
    } else {
      set_number(attributes, attribute, read_number(*field));
    }
  }
  check_attributes(attributes, true);
  return attributes;
}

SharpDevice read_device(const nvinfer1::PluginFieldCollection& fields) {
  return {static_cast<int32_t>(optional_number(fields, "multiprocessors")),
          static_cast<int32_t>(optional_number(fields, "compute_capability"))};
}

SerializedFields::SerializedFields(const SharpAttributes& attributes, SharpDevice device)
    : attributes_(attributes), device_(device) {
  const char* name = kNormalizers[attributes.normalizer].name;
  for (const AttributeDefinition& attribute : kAttributes) {
    const void* data = reinterpret_cast<const char*>(&attributes_) + attribute.offset;
    switch (attribute.type) {
      case AttributeType::kString:
        fields_.push_back({attribute.name, name, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(name) + 1)});
        break;
      case AttributeType::kFloats:
        fields_.push_back({attribute.name, data, PluginFieldType::kFLOAT32, attributes_.temperature_terms});
        break;
      case AttributeType::kFloat:
        fields_.push_back({attribute.name, data, PluginFieldType::kFLOAT32, 1});
        break;
      case AttributeType::kInt:
        fields_.push_back({attribute.name, data, PluginFieldType::kINT32, 1});
        break;
    }
  }
  fields_.push_back({"multiprocessors", &device_.multiprocessors, PluginFieldType::kINT32, 1});
  fields_.push_back({"compute_capability", &device_.compute_capability, PluginFieldType::kINT32, 1});
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

std::string describe(const SharpAttributes& attributes) {
  std::ostringstream text;
  text.precision(9);  // 9 digits identify every float32
  text << kNormalizers[attributes.normalizer].name;
  for (const AttributeDefinition& attribute : kAttributes) {
    if (attribute.type == AttributeType::kString) continue;
    text << ' ' << attribute.name << '=';
    if (attribute.type != AttributeType::kFloats) text << number_of(attributes, attribute);
    for (int32_t index = 0; attribute.type == AttributeType::kFloats && index < attributes.temperature_terms; ++index)
      text << (index == 0 ? "" : ",") << attributes.temperature_coefficients[index];
  }
  return text.str();
}

}  // namespace sharp::tensorrt
