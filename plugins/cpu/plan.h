// The division of one call's work into tiles of query rows and parts of keys.
#pragma once

#include <vector>

#include "tile.h"

namespace sharp::cpu {

// A tile with the parts of its keys, each of which one thread computes.
struct Work {
  Tile tile;
  std::vector<KeyRange> parts;  // if there are several, threads share the tile's keys and the results are merged
};

// Divides the work. The division depends on the shapes alone, so a call gives the same bits with any number of threads.
// `stored` is whether the normalizer keeps its logits, which limits the rows of a tile by the length of the context.
// The tiles with the most keys come first.
std::vector<Work> plan_work(const Problem& problem, bool stored);

}  // namespace sharp::cpu
