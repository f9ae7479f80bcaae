// exp, log, tanh and power on vectors: Cephes' float polynomials, a few units in the last place. AVX-512 takes numbers
// apart and puts them together in one instruction, so there the log has a shorter form.
#pragma once

#include "vector.h"

namespace sharp::cpu::SHARP_ISA {

constexpr float kLowestExponent = -87.0f;  // below it a float leaves its normal range

// e^x for x <= 0; exactly 0 below kLowestExponent. NaN stays NaN.
inline Vec exp_nonpositive(Vec x) {
  constexpr float kLog2E = 1.44269504088896341f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Vec bounded = maximum(splat(kLowestExponent), x);  // keeps a NaN of x
  const Vec shifted = bounded * kLog2E + kRounder;
  const Vec n = shifted - kRounder;
  const Vec r = (bounded - n * kLn2High) - n * kLn2Low;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
  const __mmask16 normal =
      _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(splat(kLowestExponent)), _CMP_NLT_UQ);
  return reinterpret_cast<Vec>(
      _mm512_maskz_scalef_ps(normal, reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
#else
  const Vec result = from_bits(bits_of(p) + (bits_of(shifted) << 23));
  return select(x < kLowestExponent, Vec{}, select(x == x, result, x));
#endif
}

// ln x for normal x > 0; +inf and NaN stay what they are.
inline Vec log_positive(Vec x) {
#if defined(__AVX512F__)
  // x = m 2^e with m in [0.75, 1.5), and ln m = r - r^2 / 2 + r^3 P(r) with r = m - 1, P fitted to 4e-8 of ln m.
  const __m512 mantissa = _mm512_getmant_ps(reinterpret_cast<__m512>(x), _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  const Vec e = reinterpret_cast<Vec>(_mm512_getexp_ps(reinterpret_cast<__m512>(x))) -
                reinterpret_cast<Vec>(_mm512_getexp_ps(mantissa));
  const Vec r = reinterpret_cast<Vec>(mantissa) - 1.0f;
  const Vec square = r * r;  // Estrin's scheme: Horner's is one chain of nine operations
  const Vec low = (r * 3.333347068e-01f - 0.5f) + (r * 1.998232121e-01f - 2.499636021e-01f) * square;
  const Vec high = (r * 1.490443398e-01f - 1.678883190e-01f) + (r * 5.559568759e-02f - 1.211400507e-01f) * square;
  return (high * (square * square) + low) * square + r + e * 0.693147180559945f;
#else
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f, kSqrtHalf = 0.707106781186547524f;
  const VecInt exponent_bits = ((bits_of(x) >> 23) & 0xff) - 126;
  const Vec half_to_one = from_bits((bits_of(x) & 0x007fffff) | 0x3f000000);
  const VecInt small = half_to_one < kSqrtHalf;
  const Vec exponent = __builtin_convertvector(exponent_bits + small, Vec);
  const Vec r = select(small, half_to_one + half_to_one, half_to_one) - 1.0f;
  Vec p = splat(7.0376836292e-2f);
  p = p * r - 1.1514610310e-1f;
  p = p * r + 1.1676998740e-1f;
  p = p * r - 1.2420140846e-1f;
  p = p * r + 1.4249322787e-1f;
  p = p * r - 1.6668057665e-1f;
  p = p * r + 2.0000714765e-1f;
  p = p * r - 2.4999993993e-1f;
  p = p * r + 3.3333331174e-1f;
  const Vec square = r * r;
  const Vec tail = p * r * square + exponent * kLn2Low - 0.5f * square;
  const Vec result = r + tail + exponent * kLn2High;
  return select(x < kInfinity, result, x);
#endif
}

inline Vec tanh_of(Vec x) {
  const Vec magnitude = absolute(x), square = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vec near = p * square * x + x;
  const Vec e = exp_nonpositive(magnitude * -2.0f);
  const Vec far = with_sign_of((1.0f - e) / (1.0f + e), x);
  return select(magnitude < 0.625f, near, far);
}

// x^power for 0 <= x <= 1 and power > 0; 0 for x = 0 (and for x below the normal range). NaN stays NaN.
inline Vec power_of(Vec x, float power) {
  constexpr float kSmallestNormal = 1.17549435e-38f;
  return select(x < kSmallestNormal, Vec{}, exp_nonpositive(log_positive(x) * power));
}

}  // namespace sharp::cpu::SHARP_ISA
