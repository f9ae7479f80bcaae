// The memory of parts that are being computed.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "aligned.h"
#include "finish.h"
#include "screen.h"
#include "tile.h"

namespace sharp::cpu {

// States, output sums and, for normalizers that store them, logits of the parts that cover the keys of a tile.
class TileBuffers {
 public:
  // Allocates only if the last tile needed less. The logits of a row are contiguous over all parts.
  void reset(const Problem& problem, const Tile& tile, const std::vector<KeyRange>& ranges, const Loops& loops) {
    const int64_t value_dim = problem.value_dim;
    const int64_t rows = tile.rows(), count = static_cast<int64_t>(ranges.size());
    const int64_t span = (tile.key_end - tile.key_begin + kChunkKeys - 1) / kChunkKeys * kChunkKeys;
    grow(states_, states_size_, rows * count);
    // bfloat_products.h adds to 16 rows at once.
    const int64_t output_size = (rows + 15) / 16 * 16 * value_dim;
    grow(output_, output_size_, output_size * count);
    if (loops.keeps_logits()) grow(logits_, logits_size_, rows * span);
    if (loops.selects()) grow(keys_, keys_size_, rows * span);
    const bool screened = is_screened(problem, tile, loops), lowest = screened && problem.stats != nullptr;
    const int64_t strips = span / kStripKeys;
    if (screened) grow(highest_bounds_, highest_bounds_size_, rows * strips);
    if (lowest) grow(lowest_bounds_, lowest_bounds_size_, rows * strips);
    span_ = span;
    parts_.clear();
    for (int64_t index = 0; index < count; ++index) {
      const int64_t offset = ranges[index].begin - tile.key_begin;
      float* logits = loops.keeps_logits() ? logits_.get() + offset : nullptr;
      int32_t* keys = loops.selects() ? keys_.get() + offset : nullptr;
      float* highest = screened ? highest_bounds_.get() + offset / kStripKeys : nullptr;
      float* least = lowest ? lowest_bounds_.get() + offset / kStripKeys : nullptr;
      parts_.push_back({ranges[index], states_.get() + index * rows, output_.get() + index * output_size, logits, span,
                        keys, highest, least, strips});
      start_part(parts_.back(), rows, value_dim);
    }
  }

  const Part& part(int64_t index) const { return parts_[index]; }
  const Part* parts() const { return parts_.data(); }
  int64_t count() const { return static_cast<int64_t>(parts_.size()); }

 private:
  template <typename T>
  static void grow(AlignedArray<T>& buffer, int64_t& size, int64_t needed) {
    if (needed <= size) return;
    buffer = aligned_array<T>(needed);
    size = needed;
  }

  AlignedArray<RowState> states_;
  AlignedArray<float> output_, logits_, highest_bounds_, lowest_bounds_;
  AlignedArray<int32_t> keys_;
  int64_t states_size_ = 0, output_size_ = 0, logits_size_ = 0, keys_size_ = 0, span_ = 0;
  int64_t highest_bounds_size_ = 0, lowest_bounds_size_ = 0;
  std::vector<Part> parts_;
};

// The buffers of a thread that works on one part, and the tile's buffers for a tile of one part.
struct ThreadBuffers {
  explicit ThreadBuffers(const Problem& problem)
      : query(aligned_array<float>(kMaxTileRows * problem.head_dim)),
        weights(aligned_array<float>(kMaxTileRows * kChunkKeys)) {
    if (packs(problem) || problem.block_size % 16 != 0)
      packed_keys = aligned_array<float>(problem.head_dim * kChunkKeys);
    if (packs(problem)) packed_values = aligned_array<float>(kChunkKeys * problem.value_dim);
    if (problem.key_screen != nullptr)
      query_integers = aligned_array<int16_t>(kScreenedRows * screen_query_size(problem));
    if (problem.cache_type != SHARP_BFLOAT16 && !has_scales(problem.cache_type)) return;
    const int64_t channels = (problem.head_dim + kBfloatItems - 1) / kBfloatItems * kBfloatItems;
    query_parts = aligned_array<Bfloat16>(kQueryParts * kMaxTileRows * channels);
    weight_parts = aligned_array<Bfloat16>(kWeightParts * kMaxTileRows * kChunkKeys);
    key_tiles = aligned_array<Bfloat16>(kChunkKeys * channels);
    value_tiles = aligned_array<Bfloat16>(kChunkKeys * problem.value_dim);
  }

  static bool packs(const Problem& problem) { return problem.cache_type != SHARP_FLOAT32; }
  Scratch scratch() const {
    return {query.get(),        weights.get(),   packed_keys.get(), packed_values.get(), query_parts.get(),
            weight_parts.get(), key_tiles.get(), value_tiles.get(), query_integers.get()};
  }

  AlignedArray<float> query, weights, packed_keys, packed_values;
  AlignedArray<Bfloat16> query_parts, weight_parts, key_tiles, value_tiles;
  AlignedArray<int16_t> query_integers;
  TileBuffers tile;
};

// A pool of thread buffers for tasks, so that there are as many buffers as threads and not as many as tasks.
class BufferPool {
 public:
  explicit BufferPool(const Problem& problem) : problem_(problem) {}

  std::unique_ptr<ThreadBuffers> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<ThreadBuffers>(problem_);
    std::unique_ptr<ThreadBuffers> buffers = std::move(free_.back());
    free_.pop_back();
    return buffers;
  }

  void give_back(std::unique_ptr<ThreadBuffers> buffers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(buffers));
  }

 private:
  const Problem& problem_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<ThreadBuffers>> free_;
};

}  // namespace sharp::cpu
