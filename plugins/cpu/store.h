// The store of new keys and values into the paged caches.
#pragma once

#include "paged_attention.h"

namespace sharp::cpu {

// Writes the key and value of every token with a slot into the caches, converted to the cache's type.
//
// int8 and fp8: a number is scale * stored number, with one scale per block and head for keys and one for values. A
// token at offset 0 starts a block anew. A later token with larger numbers raises the scale, and the numbers in the
// block are rounded again to the new scale. Scales of fp8 are powers of two, so only numbers below the least exponent
// are rounded again.
void store_tokens(const Problem& problem, const ParallelFor& parallel_for);

}  // namespace sharp::cpu
