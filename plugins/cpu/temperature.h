// The temperature of the adaptive softmax.
#pragma once

#include "tile.h"

namespace sharp::cpu {

// Gives every part's state of row `index` beta = max(poly(H), 1) if the entropy H of its softmax, whose sums the states
// hold, is above the threshold, and else 1 (ICML 2025, Fig. 4). The sums begin anew after it.
void find_temperature(const Problem& problem, const Part* parts, int64_t count, int64_t index);

}  // namespace sharp::cpu
