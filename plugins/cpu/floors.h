// Lower bounds of entmax's threshold, from the largest logits of some keys. Logits below have weight 0.
#pragma once

#include "tile.h"
#include "vector.h"

namespace sharp::cpu::SHARP_ISA {

constexpr int kRankedKeys = 256, kRanks = kRankedKeys / kLanes;

// m^(1 - alpha) for m = 1, 2, ... kLanes keys, and for 2, 3, ... kRanks times kLanes keys.
struct SharesOfKeys {
  explicit SharesOfKeys(float alpha) : alpha(alpha) {
    for (int index = 0; index < kLanes; ++index) first[index] = share_of(index + 1);
    for (int index = 0; index < kRanks; ++index) ranked[index] = share_of((index + 1) * kLanes);
  }
  float share_of(int keys) const {
    return static_cast<float>(__builtin_pow(static_cast<double>(keys), 1.0 - static_cast<double>(alpha)));
  }
  float alpha, first[kLanes], ranked[kRanks];
};

// Returns a lower bound f of the threshold, in logits. Each lane of the parts' states holds the largest logit, or a
// lower bound of it, of distinct keys. If m lanes are v or more, m weights [(alpha - 1)(v - f)]^(1 / (alpha - 1)) at
// f = v - m^(1 - alpha) / (alpha - 1) already sum to 1, so the threshold is at least f. v is the m-th largest lane, or
// the smallest number that all lanes have in r parts, with m = r * kLanes. `slack`, times |v| + 1 / (alpha - 1), covers
// rounding errors.
//
// The result depends only on lanes above it. Replacing a lane below it by a smaller number changes nothing, so the keys
// above the result are the same with and without a screen. For alpha above 2 the result is -infinity, as a precaution:
// a key just above the threshold then has no small weight, so that no rounding is harmless.
inline float floor_of_lanes(float alpha, const Part* parts, int64_t count, int64_t row,
                            const float (RowState::*lanes)[kStateLanes], float slack) {
  if (!(alpha <= 2.0f)) return -kInfinity;
  thread_local SharesOfKeys shares(alpha);
  if (shares.alpha != alpha) shares = SharesOfKeys(alpha);
  Vec ranks[kRanks];
  const int64_t used = smaller<int64_t>(count, kRanks);
  for (int64_t rank = 0; rank < used; ++rank) ranks[rank] = splat(-kInfinity);
  for (int64_t part = 0; part < count; ++part) {
    Vec falling = load(parts[part].states[row].*lanes);
    for (int64_t rank = 0; rank < used; ++rank) {
      const Vec kept = maximum(ranks[rank], falling);
      falling = minimum(ranks[rank], falling);
      ranks[rank] = kept;
    }
  }
  const float width = 1.0f / (alpha - 1.0f);
  float best = -kInfinity;
  const auto consider = [&](float least, float share) {
    const float floor = least - width * share - (__builtin_fabsf(least) + width) * slack;
    if (floor > best) best = floor;  // false for NaN, which infinite logits give
  };
  float sorted[kLanes];
  for (int index = 0; index < kLanes; ++index) {
    const float value = ranks[0][index];
    int at = index;
    for (; at > 0 && sorted[at - 1] < value; --at) sorted[at] = sorted[at - 1];
    sorted[at] = value;
  }
  for (int index = 0; index < kLanes; ++index) consider(sorted[index], shares.first[index]);
  for (int64_t rank = 1; rank < used; ++rank) consider(minimum_of(ranks[rank]), shares.ranked[rank]);
  return best;
}

}  // namespace sharp::cpu::SHARP_ISA
