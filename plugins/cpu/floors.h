// Lower bounds of entmax's threshold from the largest logits of some keys: what lies below has weight 0.
#pragma once

#include "tile.h"
#include "vector.h"

namespace sharp::cpu::SHARP_ISA {

constexpr int kRankedKeys = 256, kRanks = kRankedKeys / kLanes;

// m^(1 - alpha) for the numbers of keys m = 1, 2, ... kLanes, and 2, 3, ... kRanks times kLanes.
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

// `lanes` of the parts' states hold the largest logit, or a lower bound of it, of distinct keys each. If m of them are
// v or more, m weights of [(alpha - 1)(v - f)]^(1 / (alpha - 1)) at f = v - m^(1 - alpha) / (alpha - 1) already sum up
// to 1, so f is a lower bound of the threshold, in logits. Here v is the m-th largest lane, or the smallest that all
// lanes have in r parts, m = r * kLanes. `slack`, times |v| + 1 / (alpha - 1), covers roundings.
//
// The result depends only on lanes above it: a smaller number in the place of one that is not changes nothing, which
// makes the keys above the result of the logits themselves the same with a screen and without. Alpha above 2 has
// -infinity, as a precaution: there a key just above the threshold has no small weight, so that no rounding is
// harmless.
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
    if (floor > best) best = floor;  // infinite logits give NaN
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
