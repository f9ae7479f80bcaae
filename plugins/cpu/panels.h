// The two small matrix products of attention over a chunk of keys, held in registers:
//   logits[row][key] = sum over channels of query[row][channel] * key[channel][key]
//   output[row][channel] += sum over keys of weight[row][key] * value[key][channel]
// Each load of a key or value serves all rows of the tile, so the heads of a group share every read of the cache.
#pragma once

#include "elements.h"
#include "tile.h"

namespace sharp::cpu::SHARP_ISA {

constexpr int kMaxPanelRows = 6;

// Returns the number of vectors per row for which rows * vectors accumulators and the operands fit the registers.
constexpr int panel_vectors(int rows) {
  int vectors = 4;
  while (vectors > 1 && rows * vectors + (rows < vectors ? rows : vectors) + 1 > kRegisters) vectors /= 2;
  return vectors;
}

// Calls `body` with a value of the element type.
template <typename Body>
void with_element(SharpType type, Body body) {
  switch (type) {
    case SHARP_FLOAT16:
      return body(Float16{});
    case SHARP_BFLOAT16:
      return body(Bfloat16{});
    case SHARP_INT8:
      return body(int8_t{});
    case SHARP_FP8:
      return body(Float8{});
    default:
      return body(0.0f);
  }
}

// Keys of a chunk as 4 strips of 16, dimension-major. While a strip is read, the memory at `ahead` is prefetched, one
// cache line per line of the strip, because a core cannot keep enough reads of a single stream in flight.
struct KeyPanel {
  SharpType type;
  int64_t stride;  // from a channel to the next, in elements
  const void* strips[kChunkKeys / 16];
  float scales[kChunkKeys / 16];
  bool fetch;  // whether `ahead` is prefetched; all its addresses are then valid
  const void* ahead[kChunkKeys / 16];
};

// Computes the logits of kRows rows and of kVectors vectors of keys, from vector number `first` on.
template <typename Element, int kRows, int kVectors, bool kFetch>
void score_panel(const float* query, int64_t channels, const KeyPanel& keys, int first, float* logits) {
  constexpr int kChannelsPerLine = 4 / sizeof(Element);
  const Element* columns[kVectors];
  const char* ahead[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const int key = (first + v) * kLanes;
    columns[v] = static_cast<const Element*>(keys.strips[key / 16]) + key % 16;
    ahead[v] = static_cast<const char*>(keys.ahead[key / 16]);
  }
  Vec sums[kRows][kVectors];
  // The sums are cleared one by one, because with "= {}" GCC would clear them in memory first.
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) sums[row][v] = Vec{};
  for (int64_t channel = 0; channel < channels; ++channel) {
    Vec panel[kVectors];
    for (int v = 0; v < kVectors; ++v) panel[v] = load(columns[v] + channel * keys.stride);
    if (kFetch && channel % kChannelsPerLine == 0)
      for (int v = 0; v < kVectors; ++v)
        if (v * kLanes % 16 == 0) __builtin_prefetch(ahead[v] + channel * 16 * sizeof(Element));
    for (int row = 0; row < kRows; ++row) {
      const Vec q = splat(query[row * channels + channel]);
      for (int v = 0; v < kVectors; ++v) sums[row][v] += q * panel[v];
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) {
      const Vec scaled = sizeof(Element) == 1 ? sums[row][v] * keys.scales[(first + v) * kLanes / 16] : sums[row][v];
      store(logits + row * kChunkKeys + (first + v) * kLanes, scaled);
    }
}

// Keys of a chunk with a weight that is not 0, and the addresses of their values. `ahead` has strips of the next chunk,
// which are prefetched as in KeyPanel.
struct ValuePanel {
  SharpType type;
  int count;
  const int* keys;            // [count], in the order of summation
  const void* const* values;  // by key
  const float* scales;        // by key
  bool fetch;                 // whether `ahead` is prefetched; all its addresses are then valid
  const void* ahead[kChunkKeys / 16];
};

// Adds weights times values to kVectors vectors of channels, from `channel` on, of kRows rows of output, `stride`
// apart.
template <typename Element, int kRows, int kVectors, bool kFetch>
void add_panel(const float* weights, const ValuePanel& panel, int64_t channel, int64_t stride, float* output) {
  constexpr int kBytesPerKey = kVectors * kLanes * sizeof(Element) / 4;  // of each strip ahead, which has 16 keys
  Vec sums[kRows][kVectors];
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) sums[row][v] = load(output + row * stride + channel + v * kLanes);
  for (int index = 0; index < panel.count; ++index) {
    const int key = panel.keys[index];
    const Element* value = static_cast<const Element*>(panel.values[key]) + channel;
    const float* weight = weights + key;
    const int64_t fetched = channel * 16 * static_cast<int64_t>(sizeof(Element)) + index * kBytesPerKey;
    if (kFetch && fetched % 64 == 0)
      for (const void* strip : panel.ahead) __builtin_prefetch(static_cast<const char*>(strip) + fetched);
    Vec channels[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      channels[v] = load(value + v * kLanes);
      if constexpr (sizeof(Element) == 1) channels[v] *= panel.scales[key];
    }
    for (int row = 0; row < kRows; ++row) {
      const Vec w = splat(weight[row * kChunkKeys]);
      for (int v = 0; v < kVectors; ++v) sums[row][v] += w * channels[v];
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) store(output + row * stride + channel + v * kLanes, sums[row][v]);
}

template <typename Element, int kRows>
void score_rows(const float* query, int64_t channels, const KeyPanel& keys, float* logits) {
  constexpr int kVectors = panel_vectors(kRows);
  for (int first = 0; first < kChunkKeys / kLanes; first += kVectors)
    if (keys.fetch)
      score_panel<Element, kRows, kVectors, true>(query, channels, keys, first, logits);
    else
      score_panel<Element, kRows, kVectors, false>(query, channels, keys, first, logits);
}

template <typename Element, int kRows, bool kFetch>
void add_rows(const float* weights, const ValuePanel& panel, int64_t channels, float* output) {
  constexpr int kVectors = panel_vectors(kRows);
  int64_t channel = 0;
  for (; channel + kVectors * kLanes <= channels; channel += kVectors * kLanes)
    add_panel<Element, kRows, kVectors, kFetch>(weights, panel, channel, channels, output);
  for (; channel + kLanes <= channels; channel += kLanes)
    add_panel<Element, kRows, 1, kFetch>(weights, panel, channel, channels, output);
  for (; channel < channels; ++channel)
    for (int index = 0; index < panel.count; ++index) {
      const int key = panel.keys[index];
      const float value = to_float(static_cast<const Element*>(panel.values[key])[channel]) * panel.scales[key];
      for (int row = 0; row < kRows; ++row) output[row * channels + channel] += weights[row * kChunkKeys + key] * value;
    }
}

// Calls `product` for groups of at most kMaxPanelRows rows, of sizes as equal as possible.
template <typename Product>
void for_row_groups(int64_t rows, Product product) {
  const int64_t groups = (rows + kMaxPanelRows - 1) / kMaxPanelRows;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t begin = rows * group / groups, end = rows * (group + 1) / groups;
    product(begin, static_cast<int>(end - begin));
  }
}

// Computes logits [rows, kChunkKeys] of query [rows, channels].
template <typename Element>
void score_elements(const float* query, int64_t rows, int64_t channels, KeyPanel keys, float* logits) {
  using Function = void (*)(const float*, int64_t, const KeyPanel&, float*);
  static constexpr Function kBySize[] = {score_rows<Element, 1>, score_rows<Element, 2>, score_rows<Element, 3>,
                                         score_rows<Element, 4>, score_rows<Element, 5>, score_rows<Element, 6>};
  for_row_groups(rows, [&](int64_t begin, int size) {
    kBySize[size - 1](query + begin * channels, channels, keys, logits + begin * kChunkKeys);
    keys.fetch = false;
  });
}

// `score_elements` for the type of the keys.
inline void score(const float* query, int64_t rows, int64_t channels, const KeyPanel& keys, float* logits) {
  with_element(keys.type,
               [&](auto element) { score_elements<decltype(element)>(query, rows, channels, keys, logits); });
}

// Adds weights [rows, kChunkKeys] times values to output [rows, channels].
template <typename Element, bool kFetch>
void add_elements(const float* weights, int64_t rows, const ValuePanel& panel, int64_t channels, float* output) {
  using Function = void (*)(const float*, const ValuePanel&, int64_t, float*);
  static constexpr Function kBySize[] = {add_rows<Element, 1, kFetch>, add_rows<Element, 2, kFetch>,
                                         add_rows<Element, 3, kFetch>, add_rows<Element, 4, kFetch>,
                                         add_rows<Element, 5, kFetch>, add_rows<Element, 6, kFetch>};
  for_row_groups(rows, [&](int64_t begin, int size) {
    kBySize[size - 1](weights + begin * kChunkKeys, panel, channels, output + begin * channels);
  });
}

// `add_elements` for the type of the values.
inline void add_values(const float* weights, int64_t rows, const ValuePanel& panel, int64_t channels, float* output) {
  if (panel.count == 0) return;
  with_element(panel.type, [&](auto element) {
    using Element = decltype(element);
    if (panel.fetch)
      add_elements<Element, true>(weights, rows, panel, channels, output);
    else
      add_elements<Element, false>(weights, rows, panel, channels, output);
  });
}

}  // namespace sharp::cpu::SHARP_ISA
