// How the work of one call is cut into tiles of query rows and parts of keys.
#pragma once

#include <vector>

#include "tile.h"

namespace sharp::cpu {

struct Work {
  Tile tile;
  std::vector<KeyRange> parts;  // more than one: threads share the tile's keys and the results are merged
};

// The cut depends on the shapes alone, so the same call gives the same bits with any number of threads. `stored` tells
// that the normalizer keeps its logits, which limits the rows of a tile by the length of the context. The tiles with
// most keys come first.
std::vector<Work> plan_work(const Problem& problem, bool stored);

}  // namespace sharp::cpu
