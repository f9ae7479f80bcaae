// exp, log, tanh and power on vectors, to a few units in the last place; log and tanh with Cephes' float polynomials.
// The forms for AVX-512 are shorter, because it splits, joins and looks up numbers in one instruction each.
#pragma once

#include "vector.h"

namespace sharp::cpu::SHARP_ISA {

constexpr float kLowestExponent = -87.0f;  // e^x of a smaller x is below float's normal range

// Returns e^x for x <= 0; exactly 0 below kLowestExponent. NaN stays NaN.
inline Vec exp_nonpositive(Vec x) {
  // x = n ln 2 + r with r in [-0.347, 0.347], and e^r = 1 + r + r^2 P(r), P fitted to 3e-9 of e^r.
  constexpr float kLog2E = 1.44269504088896341f;
#if defined(__AVX512F__)
  const Vec n = reinterpret_cast<Vec>(_mm512_roundscale_ps(reinterpret_cast<__m512>(x * kLog2E), 0));
  const Vec r = x - n * 0.693147180559945f;  // off by 2e-7 at -87, far less than the rounding of x itself
#else
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Vec bounded = maximum(splat(kLowestExponent), x);  // this order of arguments keeps a NaN of x
  const Vec shifted = bounded * kLog2E + kRounder;
  const Vec n = shifted - kRounder;
  const Vec r = (bounded - n * kLn2High) - n * kLn2Low;
#endif
  Vec p = r * 1.38146e-3f + 8.36871e-3f;
  p = p * r + 4.166839e-2f;
  p = p * r + 1.6666521e-1f;
  p = p * r + 4.9999993e-1f;
  p = (p * r + 1.0f) * r + 1.0f;
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

#if defined(__AVX512F__)
// For m in each sixteenth of [1, 2): a number c close to 1 / m, and -ln c. c is 1 for the first sixteenth, so that ln 1
// is 0 and numbers just above 1 lose no digits.
alignas(64) constexpr float kReciprocals[16] = {
    1.0f,         0.914285719f, 0.864864886f, 0.820512831f, 0.780487776f, 0.744186044f, 0.711111128f, 0.680851042f,
    0.653061211f, 0.627451003f, 0.603773594f, 0.581818163f, 0.561403513f, 0.542372882f, 0.524590135f, 0.5f};
alignas(64) constexpr float kReciprocalLogs[16] = {
    0.0f,         0.0896121562f, 0.145181984f, 0.19782573f,  0.247836202f, 0.295464218f, 0.340926558f, 0.384411722f,
    0.426084429f, 0.466089696f,  0.504556f,    0.541597307f, 0.577315331f, 0.611801565f, 0.645138025f, 0.693147182f};
#endif

// Returns ln x for normal x > 0; +inf and NaN stay +inf and NaN.
inline Vec log_positive(Vec x) {
#if defined(__AVX512F__)
  // x = m 2^e with m in [1, 2), and ln m = -ln c + ln(1 + r) with r = m c - 1 in [-1/32, 1/16), where ln(1 + r) =
  // r + r^2 P(r), P fitted to 4e-9. P is short, because ssa spends half of the time for its weights here.
  const __m512 bits = reinterpret_cast<__m512>(x);
  const __m512i sixteenth = _mm512_srli_epi32(_mm512_castps_si512(bits), 19);  // only the low four bits are used
  const auto c = reinterpret_cast<Vec>(_mm512_permutexvar_ps(sixteenth, _mm512_load_ps(kReciprocals)));
  const auto log_c = reinterpret_cast<Vec>(_mm512_permutexvar_ps(sixteenth, _mm512_load_ps(kReciprocalLogs)));
  const auto mantissa = reinterpret_cast<Vec>(_mm512_getmant_ps(bits, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src));
  const auto e = reinterpret_cast<Vec>(_mm512_getexp_ps(bits));
  const Vec r = mantissa * c - 1.0f;
  const Vec p = (r * -2.3639474e-1f + 3.3342278e-1f) * r - 5.0001321e-1f;
  return e * 0.693147180559945f + (p * (r * r) + r + log_c);
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

// Returns tanh x of any x; NaN stays NaN.
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

// Returns x^power for 0 <= x <= 1 and power > 0; 0 for x = 0 and for subnormal x. NaN stays NaN.
inline Vec power_of(Vec x, float power) {
  constexpr float kSmallestNormal = 1.17549435e-38f;
  return select(x < kSmallestNormal, Vec{}, exp_nonpositive(log_positive(x) * power));
}

}  // namespace sharp::cpu::SHARP_ISA
