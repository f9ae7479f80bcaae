// The two small matrix products of attention over a chunk of keys, held in registers:
//   logits[row][key] = sum over channels of query[row][channel] * key[channel][key]
//   output[row][channel] += sum over keys of weight[row][key] * value[key][channel]
// Every load of a key or value serves all rows of the tile, so heads of a group share each read of the cache.
#pragma once

#include "tile.h"
#include "vector.h"

namespace sharp::cpu::SHARP_ISA {

constexpr int kMaxPanelRows = 6;

// Vectors beside each other such that rows * vectors accumulators and their operands fit the registers.
constexpr int panel_vectors(int rows) {
  int vectors = 4;
  while (vectors > 1 && rows * vectors + (rows < vectors ? rows : vectors) + 1 > kRegisters) vectors /= 2;
  return vectors;
}

// Keys of a chunk as 4 strips of 16, dimension-major; strides in floats.
struct KeyPanel {
  const float* strips[kChunkKeys / 16];
  int64_t stride;
};

template <int kRows, int kVectors>
void score_panel(const float* query, int64_t channels, const KeyPanel& keys, int first, float* logits) {
  const float* columns[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const int key = (first + v) * kLanes;
    columns[v] = keys.strips[key / 16] + key % 16;
  }
  Vec sums[kRows][kVectors] = {};
  for (int64_t channel = 0; channel < channels; ++channel) {
    Vec panel[kVectors];
    for (int v = 0; v < kVectors; ++v) panel[v] = load(columns[v] + channel * keys.stride);
    for (int row = 0; row < kRows; ++row) {
      const Vec q = splat(query[row * channels + channel]);
      for (int v = 0; v < kVectors; ++v) sums[row][v] += q * panel[v];
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) store(logits + row * kChunkKeys + (first + v) * kLanes, sums[row][v]);
}

// Keys of a chunk with a weight that counts, and where their values are.
struct ValuePanel {
  const float* values[kChunkKeys];
  int keys[kChunkKeys];
  int count;
};

template <int kRows, int kVectors>
void add_panel(const float* weights, const ValuePanel& panel, int64_t channel, int64_t stride, float* output) {
  Vec sums[kRows][kVectors];
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) sums[row][v] = load(output + row * stride + channel + v * kLanes);
  for (int index = 0; index < panel.count; ++index) {
    const float* value = panel.values[index] + channel;
    const float* weight = weights + panel.keys[index];
    Vec channels[kVectors];
    for (int v = 0; v < kVectors; ++v) channels[v] = load(value + v * kLanes);
    for (int row = 0; row < kRows; ++row) {
      const Vec w = splat(weight[row * kChunkKeys]);
      for (int v = 0; v < kVectors; ++v) sums[row][v] += w * channels[v];
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) store(output + row * stride + channel + v * kLanes, sums[row][v]);
}

template <int kRows>
void score_rows(const float* query, int64_t channels, const KeyPanel& keys, float* logits) {
  constexpr int kVectors = panel_vectors(kRows);
  for (int first = 0; first < kChunkKeys / kLanes; first += kVectors)
    score_panel<kRows, kVectors>(query, channels, keys, first, logits);
}

template <int kRows>
void add_rows(const float* weights, const ValuePanel& panel, int64_t channels, float* output) {
  constexpr int kVectors = panel_vectors(kRows);
  int64_t channel = 0;
  for (; channel + kVectors * kLanes <= channels; channel += kVectors * kLanes)
    add_panel<kRows, kVectors>(weights, panel, channel, channels, output);
  for (; channel + kLanes <= channels; channel += kLanes)
    add_panel<kRows, 1>(weights, panel, channel, channels, output);
  for (; channel < channels; ++channel)
    for (int index = 0; index < panel.count; ++index)
      for (int row = 0; row < kRows; ++row)
        output[row * channels + channel] +=
            weights[row * kChunkKeys + panel.keys[index]] * panel.values[index][channel];
}

// Calls `product` for groups of at most kMaxPanelRows rows, with sizes as even as they can be.
template <typename Product>
void for_row_groups(int64_t rows, Product product) {
  const int64_t groups = (rows + kMaxPanelRows - 1) / kMaxPanelRows;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t begin = rows * group / groups, end = rows * (group + 1) / groups;
    product(begin, static_cast<int>(end - begin));
  }
}

// query [rows, channels] -> logits [rows, kChunkKeys].
inline void score(const float* query, int64_t rows, int64_t channels, const KeyPanel& keys, float* logits) {
  using Function = void (*)(const float*, int64_t, const KeyPanel&, float*);
  static constexpr Function kBySize[] = {score_rows<1>, score_rows<2>, score_rows<3>,
                                         score_rows<4>, score_rows<5>, score_rows<6>};
  for_row_groups(rows, [&](int64_t begin, int size) {
    kBySize[size - 1](query + begin * channels, channels, keys, logits + begin * kChunkKeys);
  });
}

// weights [rows, kChunkKeys] -> output [rows, channels], added to what is there.
inline void add_values(const float* weights, int64_t rows, const ValuePanel& panel, int64_t channels, float* output) {
  if (panel.count == 0) return;
  using Function = void (*)(const float*, const ValuePanel&, int64_t, float*);
  static constexpr Function kBySize[] = {add_rows<1>, add_rows<2>, add_rows<3>, add_rows<4>, add_rows<5>, add_rows<6>};
  for_row_groups(rows, [&](int64_t begin, int size) {
    kBySize[size - 1](weights + begin * kChunkKeys, panel, channels, output + begin * channels);
  });
}

}  // namespace sharp::cpu::SHARP_ISA
