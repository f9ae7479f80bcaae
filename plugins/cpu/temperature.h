// The temperature of the adaptive softmax.
#pragma once

#include "tile.h"

namespace sharp::cpu {

// Stores beta in the states of all parts of row `index`: max(poly(H), 1) if the entropy H of the row's softmax is above
// the threshold, otherwise 1 (ICML 2025, Fig. 4). H is computed from the states' sums, which are then reset.
void find_temperature(const Problem& problem, const Part* parts, int64_t count, int64_t index);

}  // namespace sharp::cpu
