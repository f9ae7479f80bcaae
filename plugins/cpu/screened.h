// The two passes over screened keys. The first pass computes an interval for every logit from the screen alone. The
// lower ends give a floor, and the second pass computes, like the ordinary loop, the logits of the keys whose upper end
// is not below the floor. All other keys are skipped. plugins/op/key_screen.py has the proof.
#pragma once

#include "screen_products.h"
#include "selected.h"

namespace sharp::cpu::SHARP_ISA {

// On AMX, more rows over a bfloat16 cache are computed by bfloat_products.h, whose sums differ in the last bits.
#if defined(__AMX_BF16__)
constexpr int64_t kScreenedBfloatRows = kMaxPanelRows;
#else
constexpr int64_t kScreenedBfloatRows = kScreenedRows;
#endif

// The factors of a row's intervals: with the integers m of the query and n of the key, the logit differs from
// z = m . n * scale * factor + constant by at most distance * of_distance + scale * of_scale + always.
struct BoundedRow {
  float factor, constant, of_distance, of_scale, always, slope;
};

// Fills the query's `integers` [screen_query_size()] and returns the factors of its row. `query` is scaled.
inline BoundedRow bound_row(const Problem& problem, const Row& row, const float* query, int16_t* integers) {
  const int64_t channels = problem.head_dim, padded = 4 * screen_quads(problem);
  for (int64_t index = 0; index < screen_query_size(problem); ++index) integers[index] = 0;
  const float slope = problem.alibi_slopes == nullptr ? 0.0f : problem.alibi_slopes[row.head];
  double square = 0, product = 0, shift_square = 0;
  float largest = 0;
  const float* shift =
      problem.key_shift == nullptr ? nullptr : problem.key_shift + row.head / problem.group() * channels;
  for (int64_t channel = 0; channel < channels; ++channel) {
    square += static_cast<double>(query[channel]) * query[channel];
    largest = larger(largest, __builtin_fabsf(query[channel]));
    if (shift == nullptr) continue;
    product += static_cast<double>(query[channel]) * shift[channel];
    shift_square += static_cast<double>(shift[channel]) * shift[channel];
  }
  // The query has no bounds, so all keys are in doubt.
  if (!(square < kLongest * kLongest) || !(__builtin_fabsf(slope) < 0x1p60f)) return {0, 0, kInfinity, 0, 0, slope};
  // Sums of products of 16-bit and 8-bit integers must fit 32 bits.
  const double most = smaller<double>(kLargestInteger, (2147483647.0 - 1) / (127.0 * static_cast<double>(padded)));
  const double length = __builtin_sqrt(square);
  const float step =
      largest < 0x1p-100f ? 0.0f : static_cast<float>(largest / static_cast<double>(static_cast<int>(most)));
  double rest_square = 0;
  for (int64_t channel = 0; channel < channels; ++channel) {
    const double number = step > 0 ? query[channel] / static_cast<double>(step) : 0;
    const double bounded = number > most ? most : number < -most ? -most : number;
    const auto integer = static_cast<int16_t>(bounded < 0 ? bounded - 0.5 : bounded + 0.5);
    integers[channel] = integer;
    const double rest = query[channel] - static_cast<double>(step) * integer;
    rest_square += rest * rest;
  }
  arrange_integers(integers, screen_quads(problem));
  constexpr double kUp = 1 + 0x1p-20;
  // Covers the rounding of every summed product and of the sums, in the ordinary loop and here.
  const double rounding = static_cast<double>(channels + 32) * 0x1p-24;
  const double longest = 127 * __builtin_sqrt(static_cast<double>(padded));  // the maximum length of a key's integers
  return {step,
          static_cast<float>(product),
          static_cast<float>(length * (1 + rounding) * kUp) + 0x1p-100f,
          static_cast<float>(longest * (__builtin_sqrt(rest_square) + rounding * length) * kUp),
          static_cast<float>(rounding * length * __builtin_sqrt(shift_square) * kUp) + 0x1p-100f,
          slope};
}

// An iterator over the strips of a part, as indexes of blocks * heads and offsets.
class StripWalk {
 public:
  StripWalk(const Problem& problem, const Tile& tile, int64_t begin)
      : problem_(problem),
        kv_head_(tile.kv_head),
        blocks_(problem.block_table + tile.sequence * problem.max_blocks + begin / problem.block_size),
        offset_(begin % problem.block_size) {}
  Strip here() const { return {*blocks_ < 0 ? -1 : *blocks_ * problem_.kv_heads + kv_head_, offset_}; }
  void advance() {
    offset_ += kStripKeys;
    if (offset_ < problem_.block_size) return;
    offset_ = 0;
    ++blocks_;
  }

 private:
  const Problem& problem_;
  int64_t kv_head_;
  const int32_t* blocks_;
  int64_t offset_;
};

struct Interval {
  Vec lower, upper;
};

// Applies soft cap and bias, like `shape_logits`, to the ends of intervals; `first` is the key of lane 0.
inline void shape_interval(const Problem& problem, const Row& row, float slope, int64_t first, Vec width,
                           Interval& ends) {
  const float cap = problem.attributes.softcap;
  if (cap > 0) {
    // The margin covers tanh_of, which is off by a few units in the last place. A logit that may be NaN has no bounds.
    const Vec margin = splat(cap * 0x1p-19f);
    const Vec upper = tanh_of(ends.upper * (1.0f / cap)) * cap + margin;
    ends.lower = tanh_of(ends.lower * (1.0f / cap)) * cap - margin;
    ends.upper = select(width < kInfinity, upper, splat(kInfinity));
    ends.lower = select(width < kInfinity, ends.lower, splat(-kInfinity));
  }
  if (slope != 0) {
    const Vec bias = absolute(lane_numbers() + static_cast<float>(first - row.position)) * slope;
    const Vec margin = absolute(bias) * 0x1p-21f;
    ends.lower -= bias + margin;
    ends.upper -= bias - margin;
  }
}

// Returns a floor below which no key has a weight: a lower bound of the largest logit, less 1 / (alpha - 1), and less
// four times the slack of `selection_floor`, which uses the largest logit itself.
inline float screened_floor(const Problem& problem, float lower) {
  const float width = 1.0f / (problem.attributes.alpha - 1.0f);
  return lower - width - (__builtin_fabsf(lower) + width) * 0x1p-20f;
}

// The results of the first pass for a row so far.
struct BoundsOfRow {
  Vec highest_lower = splat(-kInfinity), lowest_upper = splat(kInfinity);
  float floor = -kInfinity, ceiling = kInfinity;  // from this part's keys alone
};

// First pass: stores the ends of intervals in part.highest_bounds, part.lowest_bounds and the states, and counts the
// keys. A strip that is surely skipped gets infinite ends, without a look at its lanes.
inline void bound_part(const Problem& problem, const Tile& tile, const Part& part, const Scratch& scratch) {
  constexpr int kVectors = kStripKeys / kLanes, kAhead = 4;
  constexpr uint64_t kWhole = (1 << kStripKeys) - 1;
  const int64_t count = tile.rows(), quads = screen_quads(problem), query_size = screen_query_size(problem),
                strips = (part.keys.end - part.keys.begin + kStripKeys - 1) / kStripKeys;
  Row rows[kMaxTileRows];
  rows_of(problem, tile, rows);
  gather_query(problem, tile, rows, scratch.query);
  BoundedRow bounded[kScreenedRows];
  for (int64_t row = 0; row < count; ++row)
    bounded[row] = bound_row(problem, rows[row], scratch.query + row * problem.head_dim,
                             scratch.query_integers + row * query_size);
  const bool collect = part.lowest_bounds != nullptr, shaped = problem.attributes.softcap > 0;
  BoundsOfRow found[kScreenedRows];
  StripWalk walk(problem, tile, part.keys.begin), ahead = walk;
  for (int64_t strip = 0; strip < kAhead && strip < strips; ++strip) ahead.advance();
  for (int64_t strip = 0; strip < strips; ++strip, walk.advance()) {
    const auto [block, offset] = walk.here();
    const int64_t begin = part.keys.begin + strip * kStripKeys;
    const uint64_t mapped = block < 0 ? 0 : bits_in({begin, smaller(begin + kStripKeys, part.keys.end)}, begin);
    alignas(64) float products[kScreenedRows * kStripKeys];
    Vec scales[kVectors], distances[kVectors];
    const int8_t* next = nullptr;
    if (strip + kAhead < strips) {
      const auto [next_block, next_offset] = ahead.here();
      ahead.advance();
      if (next_block >= 0) {
        const ScreenBlock to = screen_block(problem, next_block);
        next = to.integers + next_offset * 4;
        __builtin_prefetch(to.scale + next_offset);
        __builtin_prefetch(to.distance + next_offset);
      }
    }
    if (mapped != 0) {
      const ScreenBlock screen = screen_block(problem, block);
      const int8_t* integers = screen.integers + offset * 4;
      if (next == nullptr) next = integers;  // prefetching the strip at hand again costs nothing
      for (int64_t row = 0; row < count; row += kScreenRows, next = integers)
        kScreenProducts[smaller<int64_t>(count - row, kScreenRows) - 1](integers, next, 4 * problem.block_size, quads,
                                                                        scratch.query_integers + row * query_size,
                                                                        query_size, products + row * kStripKeys);
      for (int v = 0; v < kVectors; ++v) {
        scales[v] = load(screen.scale + offset + v * kLanes);
        const Vec distance = load(screen.distance + offset + v * kLanes);
        distances[v] = select(distance == 0.0f, splat(kInfinity), distance);
      }
    }
    for (int64_t row = 0; row < count; ++row) {
      const uint64_t visible = bits_in(rows[row].visible, begin) & mapped;
      BoundsOfRow& bounds = found[row];
      float highest = -kInfinity, lowest = kInfinity;
      if (visible != 0) {
        part.states[row].visible += __builtin_popcountll(visible);
        const BoundedRow& by = bounded[row];
        Vec top = splat(-kInfinity), bottom = splat(kInfinity);
        for (int v = 0; v < kVectors; ++v) {
          const Vec z = load(products + row * kStripKeys + v * kLanes) * (scales[v] * by.factor) + by.constant;
          const Vec width = distances[v] * by.of_distance + (scales[v] * by.of_scale + by.always);
          Interval ends{z - width, z + width};
          if (shaped || by.slope != 0) shape_interval(problem, rows[row], by.slope, begin + v * kLanes, width, ends);
          if (visible != kWhole) {
            const VecInt seen = lanes_of(visible >> (v * kLanes));
            ends = {select(seen, ends.lower, splat(-kInfinity)), select(seen, ends.upper, splat(-kInfinity))};
          }
          bounds.highest_lower = maximum(ends.lower, bounds.highest_lower);
          top = maximum(ends.upper, top);
          if (!collect) continue;
          // A key that the row does not see has the interval [-inf, -inf].
          const VecInt seen = ends.upper > -kInfinity;
          bounds.lowest_upper = minimum(select(seen, ends.upper, splat(kInfinity)), bounds.lowest_upper);
          bottom = minimum(select(seen, ends.lower, splat(kInfinity)), bottom);
        }
        if (any(~(top <= bounds.floor))) {
          highest = maximum_of(top);
          bounds.floor = screened_floor(problem, maximum_of(bounds.highest_lower));
        }
        if (collect && any(bottom <= bounds.ceiling)) {
          lowest = minimum_of(bottom);
          bounds.ceiling = minimum_of(bounds.lowest_upper);
        }
      }
      part.highest_bounds[row * part.bounds_stride + strip] = highest;
      if (collect) part.lowest_bounds[row * part.bounds_stride + strip] = lowest;
    }
  }
  for (int64_t row = 0; row < count; ++row) {
    store(part.states[row].lower_lanes, found[row].highest_lower);
    part.states[row].lowest_upper = minimum_of(found[row].lowest_upper);
  }
}

// Stores in the states of all parts what follows from the intervals of all keys of a row.
inline void merge_bounds(const Problem& problem, const Tile& tile, const Part* parts, int64_t count) {
  for (int64_t row = 0; row < tile.rows(); ++row) {
    Vec lower = splat(-kInfinity);
    float upper = kInfinity;
    for (int64_t part = 0; part < count; ++part) {
      lower = maximum(load(parts[part].states[row].lower_lanes), lower);
      upper = smaller(parts[part].states[row].lowest_upper, upper);
    }
    const float of_largest = screened_floor(problem, maximum_of(lower));
    const float of_many = floor_of_lanes(problem.attributes.alpha, parts, count, row, &RowState::lower_lanes, 0x1p-19f);
    for (int64_t part = 0; part < count; ++part) {
      parts[part].states[row].certain_floor = of_many > of_largest ? of_many : of_largest;
      parts[part].states[row].lowest_upper = upper;
    }
  }
}

// The strips of a part that the second pass must read: strips that may hold the largest logit, a weight or, for
// statistics, the smallest logit of any row.
class Doubtful {
 public:
  Doubtful(const Tile& tile, const Part& part) : part_(part), rows_(tile.rows()) {
    for (int64_t row = 0; row < rows_; ++row) floors_[row] = part.states[row].certain_floor;
  }
  bool operator()(int64_t strip) const {
    bool found = false;
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t index = row * part_.bounds_stride + strip;
      // A part without a finite bound has a floor of -inf or NaN, so all visible keys are in doubt.
      found |= part_.highest_bounds[index] > -kInfinity && !(part_.highest_bounds[index] <= floors_[row]);
      found |= part_.lowest_bounds != nullptr && part_.lowest_bounds[index] < kInfinity &&
               part_.lowest_bounds[index] <= part_.states[row].lowest_upper;
    }
    return found;
  }

 private:
  const Part& part_;
  int64_t rows_;
  float floors_[kScreenedRows];
};

// Up to four strips anywhere in a part, because the loops read 64 keys at once.
struct StripGroup {
  int count = 0;
  int64_t begins[kChunkKeys / kStripKeys] = {};
  const void* keys[kChunkKeys / kStripKeys] = {};
};

inline void select_group(const Problem& problem, const Tile& tile, const Part& part, const Scratch& scratch,
                         const Row* rows, const StripGroup& group, const StripGroup& next) {
  KeyPanel panel{problem.cache_type, problem.block_size, {}, {1, 1, 1, 1}, next.count > 0, {}};
  uint64_t mapped = 0;
  for (int strip = 0; strip < kChunkKeys / kStripKeys; ++strip) {
    panel.strips[strip] = group.keys[strip < group.count ? strip : 0];
    panel.ahead[strip] = next.keys[strip < next.count ? strip : 0];
  }
  score(scratch.query, tile.rows(), problem.head_dim, panel, scratch.weights);
  for (int strip = 0; strip < group.count; ++strip)
    mapped |= bits_in({0, part.keys.end - group.begins[strip]}, 0) % (1 << kStripKeys) << (strip * kStripKeys);
  for (int64_t index = 0; index < tile.rows(); ++index) {
    uint64_t visible = 0;
    for (int strip = 0; strip < group.count; ++strip)
      visible |= bits_in(rows[index].visible, group.begins[strip]) % (1 << kStripKeys) << (strip * kStripKeys);
    visible &= mapped;
    if (visible == 0) continue;
    float* logits = scratch.weights + index * kChunkKeys;
    shape_logits(problem, rows[index], group.begins, visible, logits);
    select_row(problem, part, index, group.begins, visible, logits);
  }
}

// Second pass: selects logits among the keys in doubt.
inline void select_doubtful(const Problem& problem, const Tile& tile, const Part& part, const Scratch& scratch) {
  const int64_t strips = (part.keys.end - part.keys.begin + kStripKeys - 1) / kStripKeys;
  const Doubtful doubtful(tile, part);
  int64_t read = 0;
  for (int64_t strip = 0; strip < strips; ++strip) read += doubtful(strip);
  if (read * kReadAllDenominator > strips * kReadAllNumerator) {
    for (int64_t row = 0; row < tile.rows(); ++row) part.states[row].visible = 0;  // select_part counts the keys again
    return select_part(problem, tile, part, scratch);
  }
  Row rows[kMaxTileRows];
  rows_of(problem, tile, rows);
  gather_query(problem, tile, rows, scratch.query);
  StripGroup groups[2];
  StripWalk walk(problem, tile, part.keys.begin);
  for (int64_t strip = 0; strip < strips; ++strip, walk.advance()) {
    if (!doubtful(strip)) continue;
    const auto [block, offset] = walk.here();
    StripGroup& filled = groups[1];
    filled.begins[filled.count] = part.keys.begin + strip * kStripKeys;
    filled.keys[filled.count++] = key_at(problem, block, offset);
    if (filled.count < kChunkKeys / kStripKeys) continue;
    if (groups[0].count > 0) select_group(problem, tile, part, scratch, rows, groups[0], filled);
    groups[0] = filled;
    filled = {};
  }
  for (const StripGroup& group : groups)
    if (group.count > 0)
      select_group(problem, tile, part, scratch, rows, group, &group == groups ? groups[1] : StripGroup{});
  for (int64_t index = 0; index < tile.rows(); ++index) settle<false>(part.states[index]);
}

}  // namespace sharp::cpu::SHARP_ISA
