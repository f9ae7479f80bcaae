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
};

// The attribute's value, or `fallback` when the node does not have it.
template <typename T>
T optional_attribute(const Ort::ConstKernelInfo& info, const char* name, T fallback) {
  try {
    return info.GetAttribute<T>(name);
  } catch (const Ort::Exception&) {
    return fallback;
  }
}

cpu::NormalizerKind normalizer_named(const std::string& name) {
  std::string names;
  for (const NormalizerName& normalizer : kNormalizers) {
    if (name == normalizer.name) return normalizer.kind;
    names += names.empty() ? normalizer.name : std::string(", ") + normalizer.name;
  }
  throw InputError("attribute normalizer is '" + name + "'; it must be one of " + names);
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
  try {
    attributes.temperature_coefficients = info.GetAttributes<float>("temperature_coefficients");
  } catch (const Ort::Exception&) {
    attributes.temperature_coefficients = kIcml2025Coefficients;
  }
  values.temperature_coefficients = attributes.temperature_coefficients.data();
  values.temperature_terms = static_cast<int64_t>(attributes.temperature_coefficients.size());
}

}  // namespace sharp::ort
