// New keys and values into the paged caches.
#pragma once

#include "paged_attention.h"

namespace sharp::cpu {

// Writes the key and value of every token with a slot into the caches, converted to the cache's type.
//
// int8 and fp8: a number is scale * what is stored, with one scale per block and head of keys and of values. Offset 0
// of a block starts it anew; a token with larger numbers raises the scale, and what the block holds is rounded to it
// once more. The scales of fp8 are powers of two, so of those only what falls below its least exponent is rounded.
void store_tokens(const Problem& problem, const ParallelFor& parallel_for);

}  // namespace sharp::cpu
