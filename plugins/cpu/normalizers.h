// The normalizers as parameters of the attention loops.
//
// Exponential normalizers have weight = e^(exponent(z) - shift), the shift being the running maximum of the exponents.
// Softpick shifts its weights e^z - 1 in the same way. Pointwise normalizers have weight = weight(z) without a shift. A
// masked key has z = -inf, and every normalizer gives it weight 0.
#pragma once

#include <algorithm>
#include <cmath>

#include "tile.h"
#include "vector_math.h"

namespace sharp::cpu::SHARP_ISA {

// Returns (e^z - 1) e^-shift, with `one` = e^-shift; 0 for z = -inf. A series is used near 0, where the difference
// would lose digits.
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

// SSA: weights proportional to (1 + b|z|)^(sgn(z) n) = e^t with t = n sgn(z) ln(1 + b|z|) (Eq. 5).
struct Ssa {
  static constexpr bool kExponential = true, kSparse = false;
  Ssa(const Problem& problem, const Row& row, float)
      : b(problem.head_params[row.head * problem.parameters]),
        n(problem.head_params[row.head * problem.parameters + 1]) {}
  Vec exponent(Vec z) const { return with_sign_of(log_positive(absolute(z) * b + 1.0f) * n, z); }
  float b, n;
};

// Returns the number of these keys that have a block, at least 1.
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

// Returns the effect of the number n of visible keys under a pointwise normalizer: bias - power ln n, which is added to
// sigmoid's logits, or n^-power, a factor of relu's weights.
inline float length_term(const Problem& problem, int64_t sequence, const Row& row) {
  const bool sigmoid = problem.attributes.normalizer == SHARP_SIGMOID;
  if (problem.head_params == nullptr) return sigmoid ? 0.0f : 1.0f;
  const float* params = problem.head_params + row.head * problem.parameters;
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

// Softpick: max(e^z - 1, 0), divided by the sum of all |e^z - 1| (Zuhri et al. 2025).
struct Softpick {
  static constexpr bool kExponential = true, kSparse = true;
  Softpick(const Problem&, const Row&, float = 0) {}
};

}  // namespace sharp::cpu::SHARP_ISA
