#include <cmath>
#include <string>

#include "inputs.h"

namespace sharp::ort {
namespace {

template <typename Read>
bool succeeds(Read read) {
  try {
    read();
    return true;
  } catch (const Ort::Exception&) {
    return false;
  }
}

const char* words_for(AttributeType type) {
  return type == AttributeType::kFloat ? "a float" : type == AttributeType::kInt ? "an int" : "a string";
}

// Throws if an attribute that could not be read has another type, or is missing and has no default.
void expect_absent(const Ort::ConstKernelInfo& info, const AttributeDefinition& attribute) {
  const char* name = attribute.name;
  if (succeeds([&] { info.GetAttribute<float>(name); }) || succeeds([&] { info.GetAttribute<int64_t>(name); }) ||
      succeeds([&] { info.GetAttribute<std::string>(name); }) || succeeds([&] { info.GetAttributes<float>(name); }) ||
      succeeds([&] { info.GetAttributes<int64_t>(name); }))
    throw InputError(std::string("attribute ") + name + " is of another type; it must be " + words_for(attribute.type));
  if (attribute.type != AttributeType::kFloats && std::isnan(attribute.fallback))
    throw InputError(std::string("attribute ") + name + " is missing; every node must have it");
}

}  // namespace

SharpAttributes read_attributes(const Ort::ConstKernelInfo& info) {
  SharpAttributes attributes = default_attributes();
  for (const AttributeDefinition& attribute : kAttributes) {
    bool read = false;
    if (attribute.type == AttributeType::kString) {
      std::string name;
      read = succeeds([&] { name = info.GetAttribute<std::string>(attribute.name); });
      if (read) attributes.normalizer = normalizer_named(name);
    } else if (attribute.type == AttributeType::kFloats) {
      std::vector<float> coefficients;
      read = succeeds([&] { coefficients = info.GetAttributes<float>(attribute.name); });
      if (read && coefficients.empty())  // ONNX Runtime reads an empty list from an attribute of another type
        throw InputError(std::string("attribute ") + attribute.name +
                         " is empty or of another type; it must be a list of floats");
      if (read) set_coefficients(attributes, coefficients.data(), static_cast<int64_t>(coefficients.size()));
      continue;
    } else {
      double number = 0;
      if (attribute.type == AttributeType::kFloat)
        read = succeeds([&] { number = info.GetAttribute<float>(attribute.name); });
      else
        read = succeeds([&] { number = static_cast<double>(info.GetAttribute<int64_t>(attribute.name)); });
      if (read) set_number(attributes, attribute, number);
    }
    if (!read) expect_absent(info, attribute);
  }
  check_attributes(attributes, false);
  return attributes;
}

}  // namespace sharp::ort
