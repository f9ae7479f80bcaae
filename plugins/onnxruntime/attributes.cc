#include <cmath>
#include <string>

#include "inputs.h"

namespace sharp::ort {
namespace {

const std::vector<float> kIcml2025Coefficients = {-0.037f, 0.481f, -2.3f, 4.917f, -1.791f};

struct NormalizerName {
  const char* name;
  cpu::NormalizerKind kind;
};
const NormalizerName kNormalizers[] = {
    {"softmax", cpu::NormalizerKind::kSoftmax},
    {"ssa", cpu::NormalizerKind::kSsa},
    {"adaptive_softmax", cpu::NormalizerKind::kAdaptiveSoftmax},
    {"entmax", cpu::NormalizerKind::kEntmax},
    {"sigmoid", cpu::NormalizerKind::kSigmoid},
    {"relu", cpu::NormalizerKind::kRelu},
    {"relu2", cpu::NormalizerKind::kRelu2},
    {"softpick", cpu::NormalizerKind::kSoftpick},
};

template <typename Read>
bool succeeds(Read read) {
  try {
    read();
    return true;
  } catch (const Ort::Exception&) {
    return false;
  }
}

const char* words_for(float) { return "a float"; }
const char* words_for(int64_t) { return "an int"; }
const char* words_for(const std::string&) { return "a string"; }

// Called when an attribute cannot be read as `type`: one of another type must not pass for one that is left out.
void expect_absent(const Ort::ConstKernelInfo& info, const char* name, const char* type) {
  if (succeeds([&] { info.GetAttribute<float>(name); }) || succeeds([&] { info.GetAttribute<int64_t>(name); }) ||
      succeeds([&] { info.GetAttribute<std::string>(name); }) || succeeds([&] { info.GetAttributes<float>(name); }) ||
      succeeds([&] { info.GetAttributes<int64_t>(name); }))
    throw InputError(std::string("attribute ") + name + " is of another type; it must be " + type);
}

// The attribute's value, or `fallback` when the node does not have it.
template <typename T>
T optional_attribute(const Ort::ConstKernelInfo& info, const char* name, T fallback) {
  T value = fallback;
  if (!succeeds([&] { value = info.GetAttribute<T>(name); })) expect_absent(info, name, words_for(fallback));
  return value;
}

// A string of a model's author as part of one line.
std::string shown(const std::string& text) {
  constexpr size_t kMost = 64;
  std::string line = text.substr(0, kMost);
  for (char& character : line)
    if (character < ' ' || character > '~') character = '?';
  return line + (text.size() > kMost ? "..." : "");
}

cpu::NormalizerKind normalizer_named(const std::string& name) {
  std::string names;
  for (const NormalizerName& normalizer : kNormalizers) {
    if (name == normalizer.name) return normalizer.kind;
    names += names.empty() ? normalizer.name : std::string(", ") + normalizer.name;
  }
  throw InputError("attribute normalizer is '" + shown(name) + "'; it must be one of " + names);
}

}  // namespace

void read_attributes(const Ort::ConstKernelInfo& info, NodeAttributes& attributes) {
  cpu::Attributes& values = attributes.values;
  values.normalizer = normalizer_named(optional_attribute<std::string>(info, "normalizer", ""));
  values.scale = optional_attribute<float>(info, "scale", NAN);
  if (!std::isfinite(values.scale)) throw InputError("attribute scale is missing or not finite; it must be a number");
  values.alpha = optional_attribute<float>(info, "alpha", values.alpha);
  if (values.normalizer == cpu::NormalizerKind::kEntmax && !(values.alpha > 1 && std::isfinite(values.alpha)))
    throw InputError("attribute alpha is " + std::to_string(values.alpha) + "; entmax needs a finite alpha above 1");
  values.entropy_threshold = optional_attribute<float>(info, "entropy_threshold", values.entropy_threshold);
  values.softcap = optional_attribute<float>(info, "softcap", values.softcap);
  if (!(values.softcap >= 0 && std::isfinite(values.softcap)))
    throw InputError("attribute softcap is " + std::to_string(values.softcap) + "; it must be 0 (off) or positive");
  values.window = optional_attribute<int64_t>(info, "window", values.window);
  if (values.window < -1)
    throw InputError("attribute window is " + std::to_string(values.window) + "; it must be -1 (off), 0 or more");
  values.causal = optional_attribute<int64_t>(info, "causal", 1) != 0;
  values.stats_columns = optional_attribute<int64_t>(info, "stats_columns", values.stats_columns);
  if (values.stats_columns != 4 && values.stats_columns != 5)
    throw InputError("attribute stats_columns is " + std::to_string(values.stats_columns) +
                     "; it must be 4, or 5 with the sink's mass");
  values.key_bound = optional_attribute<float>(info, "key_bound", values.key_bound);
  if (!(values.key_bound >= 0))
    throw InputError("attribute key_bound is " + std::to_string(values.key_bound) +
                     "; it must be 0 (not known) or more");
  std::vector<float>& coefficients = attributes.temperature_coefficients;
  if (!succeeds([&] { coefficients = info.GetAttributes<float>("temperature_coefficients"); }))
    coefficients = kIcml2025Coefficients;
  if (coefficients.empty())  // what ONNX Runtime reads of another type
    throw InputError("attribute temperature_coefficients is empty or of another type; it must be a list of floats");
  values.temperature_coefficients = coefficients.data();
  values.temperature_terms = static_cast<int64_t>(coefficients.size());
}

}  // namespace sharp::ort
