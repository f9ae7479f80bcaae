#include "attributes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <sstream>

namespace sharp::tensorrt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

// In the order of SharpNormalizer.
const char* const kNormalizers[] = {"softmax", "ssa",   "adaptive_softmax", "entmax", "sigmoid",
                                    "relu",    "relu2", "softpick"};
constexpr int kNormalizerCount = sizeof(kNormalizers) / sizeof(kNormalizers[0]);
constexpr float kIcml2025Coefficients[] = {-0.037f, 0.481f, -2.3f, 4.917f, -1.791f};

SharpNormalizer normalizer_named(const std::string& name) {
  std::string names;
  for (int index = 0; index < kNormalizerCount; ++index) {
    if (name == kNormalizers[index]) return static_cast<SharpNormalizer>(index);
    names += (names.empty() ? "" : ", ") + std::string(kNormalizers[index]);
  }
  throw InputError("attribute normalizer is '" + name + "'; it must be one of " + names);
}

const PluginField* find(const nvinfer1::PluginFieldCollection& fields, const char* name) {
  for (int32_t index = 0; index < fields.nbFields; ++index)
    if (std::strcmp(fields.fields[index].name, name) == 0) return &fields.fields[index];
  return nullptr;
}

std::string read_text(const PluginField& field) {
  if (field.type != PluginFieldType::kCHAR)
    throw InputError(std::string("attribute ") + field.name + " must be a string");
  const std::string text(static_cast<const char*>(field.data), field.length);
  return text.substr(0, text.find('\0'));  // the parser counts the zero at the end
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

double optional_number(const nvinfer1::PluginFieldCollection& fields, const char* name, double fallback) {
  const PluginField* field = find(fields, name);
  return field == nullptr ? fallback : read_number(*field);
}

std::string text_of(float number) {
  std::ostringstream text;
  text.precision(9);  // enough for every float32
  text << number;
  return text.str();
}

}  // namespace

const nvinfer1::PluginFieldCollection* field_names() {
  static const std::vector<PluginField> fields = {
      {"normalizer", nullptr, PluginFieldType::kCHAR, 1},
      {"scale", nullptr, PluginFieldType::kFLOAT32, 1},
      {"alpha", nullptr, PluginFieldType::kFLOAT32, 1},
      {"temperature_coefficients", nullptr, PluginFieldType::kFLOAT32, 1},
      {"entropy_threshold", nullptr, PluginFieldType::kFLOAT32, 1},
      {"softcap", nullptr, PluginFieldType::kFLOAT32, 1},
      {"window", nullptr, PluginFieldType::kINT32, 1},
      {"causal", nullptr, PluginFieldType::kINT32, 1},
      {"stats_columns", nullptr, PluginFieldType::kINT32, 1},
  };
  static const nvinfer1::PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
  return &collection;
}

SharpAttributes read_fields(const nvinfer1::PluginFieldCollection& fields) {
  SharpAttributes attributes{};
  const PluginField* normalizer = find(fields, "normalizer");
  attributes.normalizer = normalizer_named(normalizer == nullptr ? "" : read_text(*normalizer));
  attributes.scale = static_cast<float>(optional_number(fields, "scale", NAN));
  if (!(attributes.scale > 0 && std::isfinite(attributes.scale)))
    throw InputError("attribute scale is missing, not positive or not finite; it must be a positive number");
  attributes.alpha = static_cast<float>(optional_number(fields, "alpha", 1.5));
  if (attributes.normalizer == SHARP_ENTMAX && !(attributes.alpha > 1 && std::isfinite(attributes.alpha)))
    throw InputError("attribute alpha is " + text_of(attributes.alpha) + "; entmax needs a finite alpha above 1");
  attributes.entropy_threshold = static_cast<float>(optional_number(fields, "entropy_threshold", 0.5));
  attributes.softcap = static_cast<float>(optional_number(fields, "softcap", 0));
  if (!(attributes.softcap >= 0 && std::isfinite(attributes.softcap)))
    throw InputError("attribute softcap is " + text_of(attributes.softcap) + "; it must be 0 (off) or positive");
  attributes.window = static_cast<int32_t>(std::clamp<double>(optional_number(fields, "window", -1), -2, INT32_MAX));
  if (attributes.window < -1)
    throw InputError("attribute window is " + std::to_string(attributes.window) + "; it must be -1 (off), 0 or more");
  attributes.causal = optional_number(fields, "causal", 1) != 0;
  const double columns = optional_number(fields, "stats_columns", 4);  // engines of before have no such field
  if (columns != 4 && columns != 5)
    throw InputError("attribute stats_columns is " + text_of(static_cast<float>(columns)) +
                     "; it must be 4, or 5 with the sink's mass");
  attributes.stats_columns = static_cast<int32_t>(columns);

  const PluginField* coefficients = find(fields, "temperature_coefficients");
  const PluginField usual("temperature_coefficients", kIcml2025Coefficients, PluginFieldType::kFLOAT32, 5);
  const PluginField& given = coefficients == nullptr ? usual : *coefficients;
  if (given.length < 1 || given.length > SHARP_MAX_TEMPERATURE_TERMS)
    throw InputError("attribute temperature_coefficients has " + std::to_string(given.length) +
                     " numbers; TensorRT's plugin takes 1 to " + std::to_string(SHARP_MAX_TEMPERATURE_TERMS));
  attributes.temperature_terms = given.length;
  for (int32_t index = 0; index < given.length; ++index)
    attributes.temperature_coefficients[index] = static_cast<float>(read_number(given, index));
  return attributes;
}

SharpDevice read_device(const nvinfer1::PluginFieldCollection& fields) {
  return {static_cast<int32_t>(optional_number(fields, "multiprocessors", 0)),
          static_cast<int32_t>(optional_number(fields, "compute_capability", 0))};
}

SerializedFields::SerializedFields(const SharpAttributes& attributes, SharpDevice device)
    : attributes_(attributes), device_(device), normalizer_(kNormalizers[attributes.normalizer]) {
  fields_ = {
      {"normalizer", normalizer_.c_str(), PluginFieldType::kCHAR, static_cast<int32_t>(normalizer_.size() + 1)},
      {"scale", &attributes_.scale, PluginFieldType::kFLOAT32, 1},
      {"alpha", &attributes_.alpha, PluginFieldType::kFLOAT32, 1},
      {"temperature_coefficients", attributes_.temperature_coefficients, PluginFieldType::kFLOAT32,
       attributes_.temperature_terms},
      {"entropy_threshold", &attributes_.entropy_threshold, PluginFieldType::kFLOAT32, 1},
      {"softcap", &attributes_.softcap, PluginFieldType::kFLOAT32, 1},
      {"window", &attributes_.window, PluginFieldType::kINT32, 1},
      {"causal", &attributes_.causal, PluginFieldType::kINT32, 1},
      {"stats_columns", &attributes_.stats_columns, PluginFieldType::kINT32, 1},
      {"multiprocessors", &device_.multiprocessors, PluginFieldType::kINT32, 1},
      {"compute_capability", &device_.compute_capability, PluginFieldType::kINT32, 1},
  };
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

std::string describe(const SharpAttributes& attributes) {
  std::ostringstream text;
  text.precision(9);  // enough for every float32
  text << kNormalizers[attributes.normalizer] << " scale=" << attributes.scale << " alpha=" << attributes.alpha
       << " threshold=" << attributes.entropy_threshold << " softcap=" << attributes.softcap
       << " window=" << attributes.window << " causal=" << attributes.causal << " columns=" << attributes.stats_columns
       << " coefficients=";
  for (int32_t index = 0; index < attributes.temperature_terms; ++index)
    text << (index == 0 ? "" : ",") << attributes.temperature_coefficients[index];
  return text.str();
}

}  // namespace sharp::tensorrt
