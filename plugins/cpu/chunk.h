// A chunk of kChunkKeys keys of one sequence and key-value head, found through the block table.
#pragma once

#include "panels.h"
#include "tile.h"
#include "vector.h"

namespace sharp::cpu::SHARP_ISA {

struct Chunk {
  uint64_t mapped;  // bit per key: it lies before the end and its block is not a hole
  KeyPanel keys;
  const float* values[kChunkKeys];
};

inline uint64_t first_bits(int64_t count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

// Bits of the keys of the chunk at `begin` that lie in `range`.
inline uint64_t bits_in(KeyRange range, int64_t begin) {
  const int64_t low = larger<int64_t>(range.begin - begin, 0), high = larger<int64_t>(range.end - begin, 0);
  return first_bits(high) & ~first_bits(low);
}

// Copies keys that are not 16 in a row in the cache; a channel's keys are kChunkKeys apart afterwards.
inline void pack_keys(const Problem& problem, const float* const* columns, float* packed) {
  for (int64_t channel = 0; channel < problem.head_dim; ++channel)
    for (int key = 0; key < kChunkKeys; ++key)
      packed[channel * kChunkKeys + key] = columns[key] == nullptr ? 0.0f : columns[key][channel * problem.block_size];
}

// Where key `position` of the sequence is: offset 0 of its block as an index of blocks * heads, -1 for a hole.
inline int64_t block_of(const Problem& problem, const Tile& tile, int64_t position) {
  const int32_t block = problem.block_table[tile.sequence * problem.max_blocks + position / problem.block_size];
  return block < 0 ? -1 : block * problem.kv_heads + tile.kv_head;
}

inline Chunk chunk_of_whole_strips(const Problem& problem, const Tile& tile, int64_t begin, int64_t end) {
  Chunk chunk{};
  chunk.keys.stride = problem.block_size;
  const float* any = nullptr;
  for (int strip = 0; strip < kChunkKeys / 16; ++strip) {
    const int64_t position = begin + strip * 16;
    const int64_t block = position < end ? block_of(problem, tile, position) : -1;
    if (block < 0) continue;
    const int64_t offset = position % problem.block_size;
    chunk.mapped |= bits_in({position, smaller(position + 16, end)}, begin);
    any = chunk.keys.strips[strip] = problem.key_cache + block * problem.head_dim * problem.block_size + offset;
    const float* values = problem.value_cache + (block * problem.block_size + offset) * problem.value_dim;
    for (int key = 0; key < 16; ++key) chunk.values[strip * 16 + key] = values + key * problem.value_dim;
  }
  // A strip that is not there is computed all the same, from any memory: its keys are masked.
  for (const float*& strip : chunk.keys.strips)
    if (strip == nullptr) strip = any;
  return chunk;
}

inline Chunk chunk_of_single_keys(const Problem& problem, const Tile& tile, int64_t begin, int64_t end, float* packed) {
  Chunk chunk{};
  const float* columns[kChunkKeys] = {};
  for (int key = 0; key < kChunkKeys && begin + key < end; ++key) {
    const int64_t block = block_of(problem, tile, begin + key);
    if (block < 0) continue;
    const int64_t offset = (begin + key) % problem.block_size;
    chunk.mapped |= uint64_t{1} << key;
    columns[key] = problem.key_cache + block * problem.head_dim * problem.block_size + offset;
    chunk.values[key] = problem.value_cache + (block * problem.block_size + offset) * problem.value_dim;
  }
  if (chunk.mapped != 0) pack_keys(problem, columns, packed);
  for (int strip = 0; strip < kChunkKeys / 16; ++strip) chunk.keys.strips[strip] = packed + strip * 16;
  chunk.keys.stride = kChunkKeys;
  return chunk;
}

// The keys [begin, begin + kChunkKeys), of which those before `end` count.
inline Chunk chunk_at(const Problem& problem, const Tile& tile, int64_t begin, int64_t end, float* packed) {
  return problem.block_size % 16 == 0 ? chunk_of_whole_strips(problem, tile, begin, end)
                                      : chunk_of_single_keys(problem, tile, begin, end, packed);
}

// The keys whose bit is set.
inline ValuePanel values_of(const Chunk& chunk, uint64_t bits) {
  ValuePanel panel;
  panel.count = 0;
  for (; bits != 0; bits &= bits - 1) {
    const int key = __builtin_ctzll(bits);
    panel.keys[panel.count] = key;
    panel.values[panel.count++] = chunk.values[key];
  }
  return panel;
}

}  // namespace sharp::cpu::SHARP_ISA
