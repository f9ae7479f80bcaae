// The distance at which keys of an ALiBi head surely have weight 0 under entmax.
#pragma once

#include <vector>

#include "problem.h"

namespace sharp::cpu {

// Returns, [tokens, q_heads], the distance beyond which a key surely has weight 0; empty if nothing is known. The logit
// of a key before the bias is at most B = scale |q| |k| (Cauchy-Schwarz, with the attribute `key_bound`, or the longest
// key that the scales of an int8 or fp8 cache allow), and at most the soft cap. So a key that is further back than the
// newest key by (2 B + 1 / (alpha - 1)) / slope is at or below the threshold. The result is also empty if statistics
// are collected, because the logit spread is over all keys.
std::vector<int64_t> reach_of(const Problem& problem);

}  // namespace sharp::cpu
