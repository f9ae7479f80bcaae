// Entmax: the threshold tau of a row, and the weight of a logit above it.
#pragma once

#include "row_sums.h"

namespace sharp::cpu::SHARP_ISA {

enum class Power { kOne, kTwo, kAny };

// Eq. 2 of ASEntmax's paper: weight = [s - tau]_+^k, s = (alpha - 1)(z - max z), k = 1 / (alpha - 1).
template <Power kPower>
struct Entmax {
  static constexpr int kMaxSteps = 64, kNewtonSteps = 10;

  // Finds the threshold. Let x = [s - tau]_+, F = sum x^k and G = sum x^(k-1). For k >= 1 the Newton step on
  // F^(1/k) - 1 climbs to the root from tau = -1 without passing it. For k < 1 F is concave between the keys, and
  // Newton's step on F - 1 is taken, with a bisection wherever it leaves the bracket.
  //
  // For k < 1 the steps go on until the bracket holds no number. Then the lowest keys with a weight are certain, and
  // they share what the others leave of 1: their weights are roots of so high an order that no float32 tau gives them.
  //
  // A sink is one more key, whose logit is not among the `count` logits.
  static void solve(const Problem& problem, const float* logits, int64_t count, float sink, RowState& state) {
    const double alpha = problem.attributes.alpha, k = 1 / (alpha - 1);
    const bool has_sink = sink > -kInfinity;
    const float highest = state.highest > sink ? state.highest : sink;
    const float factor = problem.attributes.alpha - 1.0f, power = static_cast<float>(k);
    const auto competing = static_cast<double>(state.visible + has_sink);
    float low = -1.0f, high = static_cast<float>(-__builtin_pow(competing, 1 - alpha));
    float tau = low;
    for (int step = 0; step < kMaxSteps; ++step) {
      Sums sums = sum_row(logits, count, [&](Vec z, Vec& sum, Vec& slope) {
        const Vec s = (z - highest) * factor, shifted = s - tau;
        const VecInt zero = has_no_weight(s, tau, shifted);
        const Vec x = select(zero, Vec{}, shifted);
        if constexpr (kPower == Power::kOne) {
          sum += x;
          slope += select(zero, Vec{}, splat(1.0f));
        } else if constexpr (kPower == Power::kTwo) {
          sum += x * x;
          slope += x;
        } else {
          const Vec w = power_of(x, power);
          sum += w;
          slope += select(zero, Vec{}, w / x);
        }
      });
      const double of_sink = has_sink ? static_cast<double>((sink - highest) * factor) - tau : 0;
      if (of_sink > 0) {
        const double slope = __builtin_pow(of_sink, k - 1);
        sums.first += slope * of_sink;
        sums.second += slope;
      }
      (sums.first >= 1 ? low : high) = tau;
      const double newton = k >= 1 ? (1 - __builtin_pow(sums.first, 1 - alpha)) * sums.first / sums.second
                                   : (sums.first - 1) / (k * sums.second);
      float next = static_cast<float>(tau + newton);
      if (k >= 1 && next == tau) break;
      // The ends of the bracket count as outside, because steps from one end to the other would never stop. For k < 1
      // the slope is infinite next to a key that is about to get a weight, so steps become ever shorter there.
      const bool slow = k >= 1 ? step >= kMaxSteps / 2 && step % 2 == 0 : step >= kNewtonSteps;
      if (!(next > low && next < high) || slow) next = low + (high - low) / 2;
      if (k >= 1 ? next == tau : !(next > low && next < high)) break;
      tau = next;
    }
    state.threshold = state.floor = state.level = tau;
    state.share = 0;
    if (k >= 1 || !(low < high)) return;  // there is no bracket if a logit is NaN
    const float of_sink = has_sink ? (sink - highest) * factor : -kInfinity;
    Vec lowest = splat(of_sink > low ? of_sink : 1.0f);
    for (int64_t key = 0; key < count; key += kLanes) {
      const Vec s = (load(logits + key) - highest) * factor;
      lowest = minimum(select(s > low, s, splat(1.0f)), lowest);
    }
    state.threshold = high;
    state.floor = low;
    state.level = minimum_of(lowest);
    Sums sums = sum_row(logits, count, [&](Vec z, Vec& sum, Vec& last) {
      const Vec s = (z - highest) * factor, shifted = s - high;
      sum += power_of(select((s <= high) | (s <= state.level), Vec{}, shifted), power);
      last += select((s > low) & (s <= state.level), splat(1.0f), Vec{});
    });
    if (of_sink > state.level && of_sink > high) sums.first += __builtin_pow(static_cast<double>(of_sink) - high, k);
    sums.second += of_sink > low && of_sink <= state.level;
    if (sums.first < 1 && sums.second > 0) state.share = static_cast<float>((1 - sums.first) / sums.second);
  }

  // Compares the rounded s with tau for any power, because the fused `shifted` may be barely above 0 where s is not
  // above tau, and a high root of it is no small number.
  static VecInt has_no_weight(Vec s, float tau, Vec shifted) {
    if constexpr (kPower == Power::kAny) return s <= tau;
    return shifted <= 0.0f;
  }

  Entmax(const Problem& problem, float sink, const RowState& state)
      : highest(state.highest > sink ? state.highest : sink),
        threshold(state.threshold),
        floor(state.floor),
        level(state.level),
        share(state.share),
        factor(problem.attributes.alpha - 1.0f),
        power(1.0f / factor) {}

  Vec weight(Vec z) const {
    const Vec s = (z - highest) * factor, shifted = s - threshold;
    const VecInt zero = has_no_weight(s, threshold, shifted);
    if constexpr (kPower != Power::kAny) {
      const Vec x = select(zero, Vec{}, shifted);
      return kPower == Power::kOne ? x : x * x;
    }
    const VecInt below = s <= level;
    const Vec w = power_of(select(zero | below, Vec{}, shifted), power);
    return select(below & (s > floor), splat(share), w);
  }
  Vec log_weight(Vec, Vec weight) const { return log_positive(weight); }
  float highest, threshold, floor, level, share, factor, power;
};

}  // namespace sharp::cpu::SHARP_ISA
