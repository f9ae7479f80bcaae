// How far back the query of an ALiBi head can see a key under entmax.
#pragma once

#include <vector>

#include "problem.h"

namespace sharp::cpu {

// Per token and head, the distance beyond which a key surely has weight 0; empty where nothing is known. The content
// logit of no key exceeds B = scale |q| |k| (Cauchy-Schwarz, with the attribute `key_bound`, or the longest key that
// the scales of an int8 or fp8 cache allow) nor the soft cap, so a key further back than the newest one by (2 B + 1 /
// (alpha - 1)) / slope lies at or below the threshold. Empty too when statistics are collected: the logit spread is
// over all keys.
std::vector<int64_t> reach_of(const Problem& problem);

}  // namespace sharp::cpu
