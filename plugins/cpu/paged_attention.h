// PagedAttention on the CPU: store the new keys and values, then attend.
#pragma once

#include <cstdint>
#include <functional>

#include "problem.h"

namespace sharp::cpu {

// Calls a function for 0 ... count - 1 on any threads and returns when all are done.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

// Fills key_cache, value_cache (in place), output and stats. The problem must be valid. Memory beyond the buffers of
// `problem` grows with tokens and with context, never with their product.
void paged_attention(const Problem& problem, const ParallelFor& parallel_for);

}  // namespace sharp::cpu
