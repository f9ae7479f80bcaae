/* What head_params may be, for libsharp_cuda.so and the TensorRT plugins. */
#pragma once

#include "sharp_cuda.h"

/* What is wrong with head_params of so many columns (0: there is none) for a normalizer, in one sentence; or null. */
inline const char* sharp_head_params_mistake(SharpNormalizer normalizer, int64_t columns) {
  switch (normalizer) {
    case SHARP_SSA:
      if (columns < 2) return "ssa needs head_params [q_heads, 2]: b and n of every head";
      return columns <= 3 ? nullptr : "head_params of ssa must have 2 columns (b, n), or 3 with the sinks";
    case SHARP_SIGMOID:
      return columns == 0 || columns == 2 ? nullptr
                                          : "head_params of sigmoid must have 2 columns (bias, power); it has no sinks";
    case SHARP_RELU:
    case SHARP_RELU2:
      return columns <= 1 ? nullptr : "head_params of relu and relu2 must have 1 column (power); they have no sinks";
    default:
      return columns <= 1 ? nullptr : "head_params of this normalizer must have 1 column, the sinks";
  }
}
