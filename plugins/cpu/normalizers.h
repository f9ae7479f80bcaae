// The normalizers as parameters of the attention loops.
//
// Exponential: weight = e^(exponent(z) - shift), the shift being the running maximum of the exponents. Softpick shifts
// its weights e^z - 1 in the same way.
// Pointwise: weight = weight(z), no shift. Both see a masked key as z = -inf and give it weight 0.
#pragma once

#include <algorithm>
#include <cmath>

#include "tile.h"
#include "vector_math.h"

namespace sharp::cpu::SHARP_ISA {

// (e^z - 1) e^-shift, with `one` = e^-shift; 0 for z = -inf. Near 0 the difference would lose digits, the series does
// not.
inline Vec shifted_expm1(Vec z, float shift, float one) {
  constexpr float kReciprocals[] = {1.0f / 9, 1.0f / 8, 1.0f / 7, 1.0f / 6, 1.0f / 5, 1.0f / 4, 1.0f / 3, 1.0f / 2};
  Vec series = splat(1.0f);
  for (const float reciprocal : kReciprocals) series = series * z * reciprocal + 1.0f;
  const Vec far = exp_nonpositive(z - shift) - one;
  return select(z == -kInfinity, Vec{}, select(absolute(z) < 0.5f, series * z * one, far));
}

struct Softmax {
  static constexpr bool kExponential = true, kSparse = false;
  Softmax(const Problem&, const Row&, float = 0) {}
  Vec exponent(Vec z) const { return z; }
};

// Weight proportional to (1 + b|z|)^(sgn(z) n), which is e^t with t = n sgn(z) ln(1 + b|z|) (SSA, Eq. 5).
struct Ssa {
  static constexpr bool kExponential = true, kSparse = false;
  Ssa(const Problem& problem, const Row& row, float)
      : b(problem.head_params[row.head * problem.head_params_width]),
        n(problem.head_params[row.head * problem.head_params_width + 1]) {}
  Vec exponent(Vec z) const { return with_sign_of(log_positive(absolute(z) * b + 1.0f) * n, z); }
  float b, n;
};

// How many of these keys have a block, and at least 1.
inline int64_t mapped_keys(const Problem& problem, int64_t sequence, KeyRange keys) {
  const int32_t* table = problem.block_table + sequence * problem.max_blocks;
  int64_t count = 0;
  for (int64_t begin = keys.begin, end; begin < keys.end; begin = end) {
    const int64_t block = begin / problem.block_size;
    end = std::min(keys.end, (block + 1) * problem.block_size);
    if (table[block] >= 0) count += end - begin;
  }
  return std::max<int64_t>(count, 1);
}

// What the number n of visible keys does under a pointwise normalizer: bias - power ln n is added to sigmoid's logits,
// n^-power is a factor of relu's weights.
inline float length_term(const Problem& problem, int64_t sequence, const Row& row) {
  const bool sigmoid = problem.attributes.normalizer == NormalizerKind::kSigmoid;
  if (problem.head_params == nullptr) return sigmoid ? 0.0f : 1.0f;
  const float* params = problem.head_params + row.head * problem.head_params_width;
  const double log_count = std::log(static_cast<double>(mapped_keys(problem, sequence, row.visible)));
  return static_cast<float>(sigmoid ? params[0] - params[1] * log_count : std::exp(-params[0] * log_count));
}

struct Sigmoid {
  static constexpr bool kExponential = false, kSparse = false;
  Sigmoid(const Problem&, const Row&, float length_term) : shift(length_term) {}
  Vec weight(Vec z) const {
    z = z + shift;
    const Vec e = exp_nonpositive(-absolute(z));  // both forms of 1 / (1 + e^-z) from e^-|z|, which cannot overflow
    return select(z < 0.0f, e, splat(1.0f)) / (1.0f + e);
  }
  float shift;
};

struct Relu {
  static constexpr bool kExponential = false, kSparse = true;
  Relu(const Problem&, const Row&, float length_term) : factor(length_term) {}
  Vec weight(Vec z) const { return select(z <= 0.0f, Vec{}, z) * factor; }
  float factor;
};

struct Relu2 {
  static constexpr bool kExponential = false, kSparse = true;
  Relu2(const Problem&, const Row&, float length_term) : factor(length_term) {}
  Vec weight(Vec z) const {
    const Vec positive = select(z <= 0.0f, Vec{}, z);
    return positive * positive * factor;
  }
  float factor;
};

// max(e^z - 1, 0), divided by the sum of all |e^z - 1| (Zuhri et al. 2025).
struct Softpick {
  static constexpr bool kExponential = true, kSparse = true;
  Softpick(const Problem&, const Row&, float = 0) {}
};

}  // namespace sharp::cpu::SHARP_ISA
