// The two matrix products of attention on AMX, for many query rows and caches of bfloat16, int8 or fp8 numbers.
//
// Keys and values are exact in bfloat16. A query or a weight becomes a sum of bfloat16 parts, each the rounding of the
// remainder of the parts before it: 3 parts have the 24 bits of a float, 2 have 16. Products are summed in float32.
#pragma once

#include "chunk.h"

namespace sharp::cpu::SHARP_ISA {

#if defined(__AMX_BF16__)

// The products for one tile and part. A chunk that holds an infinity or NaN is left to the float loops, because a part
// that is 0 times infinity would be NaN.
class BfloatProducts {
 public:
  BfloatProducts(const Problem& problem, const Tile& tile, const Scratch& scratch)
      : problem_(problem),
        tile_(tile),
        scratch_(scratch),
        steps_((problem.head_dim + kStepItems - 1) / kStepItems),
        used_(tile.rows() > kMaxPanelRows && scratch.query_parts != nullptr && problem.block_size % 16 == 0) {
    if (!used_) return;
    const Configuration configuration;
    barrier();
    _tile_loadconfig(&configuration);
  }
  ~BfloatProducts() {
    if (used_) _tile_release();
  }
  BfloatProducts(const BfloatProducts&) = delete;
  BfloatProducts& operator=(const BfloatProducts&) = delete;

  // Sets query [rows, head_dim], scaled. If a number is not finite, no chunk of the tile is scored here.
  void set_query(const float* query) {
    if (!used_) return;
    const int64_t channels = problem_.head_dim, padded = steps_ * kStepItems;
    Vec zeros{};
    for (int64_t row = 0; row < padded_rows(); ++row)
      for (int64_t channel = 0; channel < padded; channel += kStepItems) {
        alignas(64) float items[kStepItems] = {};
        const int64_t count = row < tile_.rows() ? smaller<int64_t>(channels - channel, kStepItems) : 0;
        for (int64_t item = 0; item < count; ++item) items[item] = query[row * channels + channel + item];
        zeros += split<kQueryParts>(load(items), load(items + kLanes), kMaxTileRows * padded,
                                    scratch_.query_parts + row * padded + channel);
      }
    scores_ = finite(zeros);
  }

  // Computes the logits [rows, kChunkKeys] of a chunk. Returns false if the float loops must compute them.
  bool score(const Chunk& chunk, float* logits) const {
    if (!used_ || !scores_) return false;
    if (problem_.cache_type == SHARP_INT8) return score_elements<int8_t>(chunk, logits);
    if (problem_.cache_type == SHARP_FP8) return score_elements<Float8>(chunk, logits);
    return problem_.cache_type == SHARP_BFLOAT16 && score_elements<Bfloat16>(chunk, logits);
  }

  // Adds weights [rows, kChunkKeys] times values, over the keys whose bit is set, to output [rows, value_dim]. Returns
  // false if nothing was done.
  bool add(const float* weights, const Chunk& chunk, uint64_t keys, float* output) const {
    if (!used_ || problem_.value_dim % 16 != 0) return false;
    if (problem_.cache_type == SHARP_INT8) return add_elements<int8_t>(weights, chunk, keys, output);
    if (problem_.cache_type == SHARP_FP8) return add_elements<Float8>(weights, chunk, keys, output);
    return add_elements<Bfloat16>(weights, chunk, keys, output);
  }

 private:
  static constexpr int kTileRows = 16;
  static constexpr int kStepItems = kBfloatItems;
  static constexpr int kTileItems = 16 * kStepItems;  // bfloat16 numbers in a tile register
  static constexpr int kStrips = kChunkKeys / 16;

  // The configuration of all 8 tile registers as 16 rows of 64 bytes.
  struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };

  // Keeps GCC from moving memory accesses, because it does not know what memory the tile instructions read.
  static void barrier() { __asm__ volatile("" ::: "memory"); }

  int64_t padded_rows() const { return (tile_.rows() + kTileRows - 1) / kTileRows * kTileRows; }

  // Returns pairs of two consecutive channels or keys, as the instruction needs them; both are exact in bfloat16.
  static VecInt pair(Vec first, Vec second) {
    return (bits_of(first) >> 16 & 0xffff) | (bits_of(second) & static_cast<int32_t>(0xffff0000));
  }
  static void store_pair(VecInt pairs, Bfloat16* to) { _mm512_store_si512(to, reinterpret_cast<__m512i>(pairs)); }

  // Writes the parts of 32 numbers, `stride` apart. Returns 0 times the last remainder: NaN if one is not finite.
  template <int kParts>
  static Vec split(Vec first, Vec second, int64_t stride, Bfloat16* to) {
    for (int part = 0; part < kParts; ++part, to += stride) {
      const __m512i rounded = reinterpret_cast<__m512i>(
          _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first)));
      _mm512_store_si512(to, rounded);
      first -= from_bits(reinterpret_cast<VecInt>(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(rounded))) << 16);
      second -= from_bits(reinterpret_cast<VecInt>(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(rounded, 1))) << 16);
    }
    return first * 0.0f + second * 0.0f;
  }

  static bool finite(Vec zeros) { return mask_of(zeros == 0.0f) == 0xffff; }

  template <typename Element>
  bool score_elements(const Chunk& chunk, float* logits) const {
    Vec zeros{};  // sum of 0 times every number: NaN if one is not finite
    for (int strip = 0; strip < kStrips; ++strip) {
      const Element* from = static_cast<const Element*>(chunk.keys.strips[strip]);
      Bfloat16* to = scratch_.key_tiles + strip * steps_ * kTileItems;
      for (int64_t channel = 0; channel < steps_ * kStepItems; channel += 2, to += kStepItems) {
        const Vec even = channel < problem_.head_dim ? load(from + channel * chunk.keys.stride) : Vec{};
        const Vec odd = channel + 1 < problem_.head_dim ? load(from + (channel + 1) * chunk.keys.stride) : Vec{};
        zeros += even * 0.0f + odd * 0.0f;
        store_pair(pair(even, odd), to);
      }
    }
    if (!finite(zeros)) return false;
    barrier();
    const int64_t padded = steps_ * kStepItems;
    for (int64_t row = 0; row < padded_rows(); row += kTileRows) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int part = 0; part < kQueryParts; ++part)
        for (int64_t step = 0; step < steps_; ++step) {
          const Bfloat16* keys = scratch_.key_tiles + step * kTileItems;
          const Bfloat16* query = scratch_.query_parts + (part * kMaxTileRows + row) * padded + step * kStepItems;
          _tile_loadd(4, query, padded * 2);
          _tile_loadd(5, keys, 64);
          _tile_dpbf16ps(0, 4, 5);
          _tile_loadd(6, keys + steps_ * kTileItems, 64);
          _tile_dpbf16ps(1, 4, 6);
          _tile_loadd(7, keys + 2 * steps_ * kTileItems, 64);
          _tile_dpbf16ps(2, 4, 7);
          _tile_loadd(5, keys + 3 * steps_ * kTileItems, 64);
          _tile_dpbf16ps(3, 4, 5);
        }
      float* to = logits + row * kChunkKeys;
      _tile_stored(0, to, kChunkKeys * 4);
      _tile_stored(1, to + 16, kChunkKeys * 4);
      _tile_stored(2, to + 32, kChunkKeys * 4);
      _tile_stored(3, to + 48, kChunkKeys * 4);
    }
    barrier();
    if (sizeof(Element) == 1)
      for (int64_t row = 0; row < tile_.rows(); ++row)
        for (int strip = 0; strip < kStrips; ++strip) {
          float* lanes = logits + row * kChunkKeys + strip * 16;
          store(lanes, load(lanes) * chunk.keys.scales[strip]);
        }
    return true;
  }

  template <typename Element>
  bool add_elements(const float* weights, const Chunk& chunk, uint64_t keys, float* output) const {
    if (!pack_values<Element>(chunk, keys)) return false;
    alignas(64) float scales[kChunkKeys];
    for (int key = 0; key < kChunkKeys; ++key) scales[key] = keys >> key & 1 ? chunk.value_scales[key] : 0.0f;
    for (int64_t row = 0; row < tile_.rows(); ++row)
      for (int key = 0; key < kChunkKeys; key += kStepItems) {
        const float* from = weights + row * kChunkKeys + key;
        Vec first = load(from), second = load(from + kLanes);
        if (sizeof(Element) == 1) {
          first *= load(scales + key);
          second *= load(scales + key + kLanes);
        }
        split<kWeightParts>(first, second, kMaxTileRows * kChunkKeys, scratch_.weight_parts + row * kChunkKeys + key);
      }
    barrier();
    const int64_t groups = problem_.value_dim / 16;
    for (int64_t row = 0; row < padded_rows(); row += kTileRows)
      for (int64_t group = 0; group < groups; group += 4) {
        float* to = output + row * problem_.value_dim + group * 16;
        const int64_t left = groups - group;
        if (left >= 4)
          add_groups<4>(row, group, to);
        else if (left == 3)
          add_groups<3>(row, group, to);
        else if (left == 2)
          add_groups<2>(row, group, to);
        else
          add_groups<1>(row, group, to);
      }
    barrier();
    return true;
  }

  // The values of keys whose bit is not set are packed as 0, because their memory may hold NaN.
  template <typename Element>
  bool pack_values(const Chunk& chunk, uint64_t keys) const {
    const int64_t groups = problem_.value_dim / 16;
    Vec zeros{};
    for (int key = 0; key < kChunkKeys; key += 2) {
      const Element* even = keys >> key & 1 ? static_cast<const Element*>(chunk.values[key]) : nullptr;
      const Element* odd = keys >> key & 2 ? static_cast<const Element*>(chunk.values[key + 1]) : nullptr;
      Bfloat16* to = scratch_.value_tiles + key / kStepItems * groups * kTileItems + key % kStepItems * 16;
      for (int64_t group = 0; group < groups; ++group, to += kTileItems) {
        const Vec first = even == nullptr ? Vec{} : load(even + group * 16);
        const Vec second = odd == nullptr ? Vec{} : load(odd + group * 16);
        zeros += first * 0.0f + second * 0.0f;
        store_pair(pair(first, second), to);
      }
    }
    return finite(zeros);
  }

  // Adds 16 rows of kGroups * 16 channels.
  template <int kGroups>
  void add_groups(int64_t row, int64_t group, float* output) const {
    const int64_t stride = problem_.value_dim * 4, groups = problem_.value_dim / 16;
    _tile_loadd(0, output, stride);
    if constexpr (kGroups > 1) _tile_loadd(1, output + 16, stride);
    if constexpr (kGroups > 2) _tile_loadd(2, output + 32, stride);
    if constexpr (kGroups > 3) _tile_loadd(3, output + 48, stride);
    for (int part = 0; part < kWeightParts; ++part)
      for (int step = 0; step < kChunkKeys / kStepItems; ++step) {
        const Bfloat16* values = scratch_.value_tiles + (step * groups + group) * kTileItems;
        const Bfloat16* weights = scratch_.weight_parts + (part * kMaxTileRows + row) * kChunkKeys + step * kStepItems;
        _tile_loadd(4, weights, kChunkKeys * 2);
        _tile_loadd(5, values, 64);
        _tile_dpbf16ps(0, 4, 5);
        if constexpr (kGroups > 1) {
          _tile_loadd(6, values + kTileItems, 64);
          _tile_dpbf16ps(1, 4, 6);
        }
        if constexpr (kGroups > 2) {
          _tile_loadd(7, values + 2 * kTileItems, 64);
          _tile_dpbf16ps(2, 4, 7);
        }
        if constexpr (kGroups > 3) {
          _tile_loadd(5, values + 3 * kTileItems, 64);
          _tile_dpbf16ps(3, 4, 5);
        }
      }
    _tile_stored(0, output, stride);
    if constexpr (kGroups > 1) _tile_stored(1, output + 16, stride);
    if constexpr (kGroups > 2) _tile_stored(2, output + 32, stride);
    if constexpr (kGroups > 3) _tile_stored(3, output + 48, stride);
  }

  const Problem& problem_;
  const Tile& tile_;
  const Scratch& scratch_;
  const int64_t steps_;
  const bool used_;
  bool scores_ = false;
};

#else

// On other processors the float loops do everything.
struct BfloatProducts {
  BfloatProducts(const Problem&, const Tile&, const Scratch&) {}
  void set_query(const float*) {}
  bool score(const Chunk&, float*) const { return false; }
  bool add(const float*, const Chunk&, uint64_t, float*) const { return false; }
};

#endif

}  // namespace sharp::cpu::SHARP_ISA
