// The normalizers as parameters of the attention loops.
//
// Exponential: weight = e^(exponent(z) - shift), the shift being the running maximum of the exponents.
// Pointwise: weight = weight(z), no shift. Both see a masked key as z = -inf and give it weight 0.
#pragma once

#include "tile.h"
#include "vector_math.h"

namespace sharp::cpu::SHARP_ISA {

struct Softmax {
  static constexpr bool kExponential = true, kSparse = false;
  Softmax(const Problem&, const Row&) {}
  Vec exponent(Vec z) const { return z; }
};

// Weight proportional to (1 + b|z|)^(sgn(z) n), which is e^t with t = n sgn(z) ln(1 + b|z|) (SSA, Eq. 5).
struct Ssa {
  static constexpr bool kExponential = true, kSparse = false;
  Ssa(const Problem& problem, const Row& row)
      : b(problem.head_params[row.head * problem.head_params_width]),
        n(problem.head_params[row.head * problem.head_params_width + 1]) {}
  Vec exponent(Vec z) const { return with_sign_of(log_positive(absolute(z) * b + 1.0f) * n, z); }
  float b, n;
};

struct Sigmoid {
  static constexpr bool kExponential = false, kSparse = false;
  Sigmoid(const Problem&, const Row&) {}
  Vec weight(Vec z) const {
    const Vec e = exp_nonpositive(-absolute(z));  // both forms of 1 / (1 + e^-z) from e^-|z|, which cannot overflow
    return select(z < 0.0f, e, splat(1.0f)) / (1.0f + e);
  }
};

struct Relu {
  static constexpr bool kExponential = false, kSparse = true;
  Relu(const Problem&, const Row&) {}
  Vec weight(Vec z) const { return select(z <= 0.0f, Vec{}, z); }
};

struct Relu2 {
  static constexpr bool kExponential = false, kSparse = true;
  Relu2(const Problem&, const Row&) {}
  Vec weight(Vec z) const {
    const Vec positive = select(z <= 0.0f, Vec{}, z);
    return positive * positive;
  }
};

}  // namespace sharp::cpu::SHARP_ISA
