// The op's output and statistics, computed from the running sums of a tile's parts.
#pragma once

#include "tile.h"

namespace sharp::cpu {

// Initializes a part: the sums of no keys, and zero output.
void start_part(const Part& part, int64_t rows, int64_t value_dim);

// Sets highest logit, lowest logit and number of keys of the whole row `index` in the states of all parts.
void merge_observations(const Part* parts, int64_t count, int64_t index);

// The sums of the row `index` over all parts of a tile, with weights e^(t - shift); `opposed` as in RowState.
struct RowSums {
  float shift;
  double sum, weighted_log, opposed;
};
RowSums merge_sums(const Part* parts, int64_t count, int64_t index);

// Merges the parts of a tile and writes its rows of `output` and `stats`. A row that sees no key gets zeros.
// `observations_merged`: every part already counts the keys of all of them. Returns whether all of `output` is finite.
bool finish_tile(const Problem& problem, const Tile& tile, const Part* parts, int64_t count, bool observations_merged);

}  // namespace sharp::cpu
