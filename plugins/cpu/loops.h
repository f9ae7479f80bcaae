// The attention loops of every normalizer. A loop knows no more of a normalizer than its template parameter says.
#pragma once

#include "screened.h"
#include "screened_key.h"
#include "selected.h"
#include "stored.h"
#include "stream.h"

namespace sharp::cpu::SHARP_ISA {

template <typename Normalizer>
constexpr Loops streamed() {
  return {stream<Normalizer>, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, screen_key, 0};
}

template <typename Normalizer>
constexpr Loops stored() {
  return {nullptr, score_part, weigh_part<Normalizer>, nullptr, nullptr, nullptr, nullptr, screen_key, 0};
}

template <Power kPower>
constexpr Loops selected() {
  return {nullptr,      select_part,     stream_values, resolve_row<kPower>, bound_part,
          merge_bounds, select_doubtful, screen_key,    kScreenedBfloatRows};
}

// Alpha 1.5 and 2 need no power function.
inline Loops loops_for(const Attributes& attributes) {
  switch (attributes.normalizer) {
    case NormalizerKind::kSsa:
      return streamed<Ssa>();
    case NormalizerKind::kSigmoid:
      return streamed<Sigmoid>();
    case NormalizerKind::kRelu:
      return streamed<Relu>();
    case NormalizerKind::kRelu2:
      return streamed<Relu2>();
    case NormalizerKind::kSoftpick:
      return streamed<Softpick>();
    case NormalizerKind::kAdaptiveSoftmax:
      return stored<AdaptiveSoftmax>();
    case NormalizerKind::kEntmax:
      if (attributes.alpha == 1.5f) return selected<Power::kTwo>();
      if (attributes.alpha == 2.0f) return selected<Power::kOne>();
      return selected<Power::kAny>();
    default:
      return streamed<Softmax>();
  }
}

}  // namespace sharp::cpu::SHARP_ISA
