// A chunk of kChunkKeys keys of one sequence and key-value head, found through the block table.
#pragma once

#include "panels.h"
#include "tile.h"
#include "vector.h"

namespace sharp::cpu::SHARP_ISA {

// The addresses of a chunk's keys and values. `values` and `value_scales` are set for mapped keys only.
struct Chunk {
  uint64_t mapped;  // bit per key: whether it is before the end and its block is mapped
  KeyPanel keys;
  SharpType value_type;
  const void* values[kChunkKeys];
  float value_scales[kChunkKeys];     // int8 and fp8 only
  bool fetch_next;                    // whether `next` is fetched while the values are read
  const void* next[kChunkKeys / 16];  // strips of the next chunk
};

// Returns a number whose lowest `count` bits are set; `count` above 64 counts as 64.
inline uint64_t first_bits(int64_t count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

// Returns the bits of the keys in `range`, for the chunk at `begin`.
inline uint64_t bits_in(KeyRange range, int64_t begin) {
  const int64_t low = larger<int64_t>(range.begin - begin, 0), high = larger<int64_t>(range.end - begin, 0);
  return first_bits(high) & ~first_bits(low);
}

// Returns the block of key `position` as an index of blocks * heads; -1 if it is not mapped.
inline int64_t block_of(const Problem& problem, const Tile& tile, int64_t position) {
  const int32_t block = problem.block_table[tile.sequence * problem.max_blocks + position / problem.block_size];
  return block < 0 ? -1 : block * problem.kv_heads + tile.kv_head;
}

// 16 contiguous keys. `block` is an index of blocks * heads, -1 if it is not mapped or at or behind `end`.
struct Strip {
  int64_t block, offset;
};

// Finds the strips of the chunk at `begin` with a single division, if blocks consist of whole strips.
inline void strips_at(const Problem& problem, const Tile& tile, int64_t begin, int64_t end, Strip* strips) {
  const int32_t* blocks = problem.block_table + tile.sequence * problem.max_blocks + begin / problem.block_size;
  int64_t offset = begin % problem.block_size;
  for (int strip = 0; strip < kChunkKeys / 16; ++strip, offset += 16) {
    if (offset == problem.block_size) {
      offset = 0;
      ++blocks;
    }
    const int64_t block = begin + strip * 16 < end ? *blocks : -1;
    strips[strip] = {block < 0 ? -1 : block * problem.kv_heads + tile.kv_head, offset};
  }
}

// Returns the address of the first channel of a key, or of a value. `block` is an index of blocks * heads, `offset` the
// key's place in the block.
inline const char* key_at(const Problem& problem, int64_t block, int64_t offset) {
  const int64_t index = block * problem.head_dim * problem.block_size + offset;
  return static_cast<const char*>(problem.key_cache) + index * bytes_of(problem.cache_type);
}
inline const char* value_at(const Problem& problem, int64_t block, int64_t offset) {
  const int64_t index = (block * problem.block_size + offset) * problem.value_dim;
  return static_cast<const char*>(problem.value_cache) + index * bytes_of(problem.cache_type);
}

// Returns the scale of a block, given as an index of blocks * heads; 1 for a cache without scales.
inline float scale_of(const float* scales, int64_t block) { return scales == nullptr ? 1.0f : scales[block]; }

// Returns a chunk without keys.
inline Chunk empty_chunk(const Problem& problem) {
  Chunk chunk;
  chunk.mapped = 0;
  chunk.keys.type = chunk.value_type = problem.cache_type;
  chunk.keys.stride = problem.block_size;
  chunk.keys.fetch = chunk.fetch_next = false;
  for (int strip = 0; strip < kChunkKeys / 16; ++strip) {
    chunk.keys.strips[strip] = nullptr;
    chunk.keys.scales[strip] = 1.0f;
  }
  return chunk;
}

// Returns the chunk of the keys at `begin` in place; blocks must consist of whole strips.
inline Chunk chunk_of_whole_strips(const Problem& problem, const Tile& tile, int64_t begin, int64_t end) {
  Chunk chunk = empty_chunk(problem);
  const void* any = nullptr;
  const int64_t value_bytes = problem.value_dim * bytes_of(problem.cache_type);
  Strip strips[kChunkKeys / 16];
  strips_at(problem, tile, begin, end, strips);
  for (int strip = 0; strip < kChunkKeys / 16; ++strip) {
    const auto [block, offset] = strips[strip];
    if (block < 0) continue;
    const int64_t position = begin + strip * 16;
    chunk.mapped |= bits_in({position, smaller(position + 16, end)}, begin);
    any = chunk.keys.strips[strip] = key_at(problem, block, offset);
    chunk.keys.scales[strip] = scale_of(problem.key_scale, block);
    const char* values = value_at(problem, block, offset);
    const float scale = scale_of(problem.value_scale, block);
    for (int key = 0; key < 16; ++key) {
      chunk.values[strip * 16 + key] = values + key * value_bytes;
      chunk.value_scales[strip * 16 + key] = scale;
    }
  }
  // A missing strip is computed, too, from any valid memory, because its keys are masked.
  for (const void*& strip : chunk.keys.strips)
    if (strip == nullptr) strip = any;
  return chunk;
}

// Packs keys that are not 16 contiguous ones in the cache as float, with kChunkKeys keys per channel.
template <typename Element>
void pack_keys(const Problem& problem, const void* const* columns, const float* scales, float* packed) {
  for (int64_t channel = 0; channel < problem.head_dim; ++channel)
    for (int key = 0; key < kChunkKeys; ++key) {
      const Element* column = static_cast<const Element*>(columns[key]);
      packed[channel * kChunkKeys + key] =
          column == nullptr ? 0.0f : to_float(column[channel * problem.block_size]) * scales[key];
    }
}

// Returns the chunk of the keys at `begin` with the keys copied to `packed` [head_dim, kChunkKeys]; for any block size.
inline Chunk chunk_of_single_keys(const Problem& problem, const Tile& tile, int64_t begin, int64_t end, float* packed) {
  Chunk chunk = empty_chunk(problem);
  const void* columns[kChunkKeys] = {};
  float scales[kChunkKeys];
  for (int key = 0; key < kChunkKeys && begin + key < end; ++key) {
    const int64_t block = block_of(problem, tile, begin + key);
    if (block < 0) continue;
    const int64_t offset = (begin + key) % problem.block_size;
    chunk.mapped |= uint64_t{1} << key;
    columns[key] = key_at(problem, block, offset);
    scales[key] = scale_of(problem.key_scale, block);
    chunk.values[key] = value_at(problem, block, offset);
    chunk.value_scales[key] = scale_of(problem.value_scale, block);
  }
  if (chunk.mapped != 0)
    with_element(problem.cache_type,
                 [&](auto element) { pack_keys<decltype(element)>(problem, columns, scales, packed); });
  for (int strip = 0; strip < kChunkKeys / 16; ++strip) chunk.keys.strips[strip] = packed + strip * 16;
  chunk.keys.type = SHARP_FLOAT32;
  chunk.keys.stride = kChunkKeys;
  return chunk;
}

// Converts contiguous keys to float once, for tiles of many rows, each of which would convert them again.
template <typename Element>
void convert_keys(const Problem& problem, Chunk& chunk, float* packed) {
  for (int strip = 0; strip < kChunkKeys / 16; ++strip) {
    const Element* from = static_cast<const Element*>(chunk.keys.strips[strip]);
    for (int64_t channel = 0; channel < problem.head_dim; ++channel)
      for (int lane = 0; lane < 16; lane += kLanes)
        store(packed + channel * kChunkKeys + strip * 16 + lane,
              load(from + channel * chunk.keys.stride + lane) * chunk.keys.scales[strip]);
    chunk.keys.strips[strip] = packed + strip * 16;
  }
  chunk.keys.type = SHARP_FLOAT32;
  chunk.keys.stride = kChunkKeys;
}

// Converts the values of mapped keys to float once, into `packed` [kChunkKeys, channels], with their scales applied.
template <typename Element>
void convert_values(int64_t channels, Chunk& chunk, float* packed) {
  for (uint64_t bits = chunk.mapped; bits != 0; bits &= bits - 1) {
    const int key = __builtin_ctzll(bits);
    const Element* from = static_cast<const Element*>(chunk.values[key]);
    float* to = packed + key * channels;
    int64_t channel = 0;
    for (; channel + kLanes <= channels; channel += kLanes)
      store(to + channel, load(from + channel) * chunk.value_scales[key]);
    for (; channel < channels; ++channel) to[channel] = to_float(from[channel]) * chunk.value_scales[key];
    chunk.values[key] = to;
    chunk.value_scales[key] = 1.0f;
  }
  chunk.value_type = SHARP_FLOAT32;
}

inline void convert_keys(const Problem& problem, const Scratch& scratch, Chunk& chunk) {
  with_element(problem.cache_type, [&](auto element) {
    if (chunk.keys.type != SHARP_FLOAT32) convert_keys<decltype(element)>(problem, chunk, scratch.packed_keys);
  });
}

inline void convert_values(const Problem& problem, const Scratch& scratch, Chunk& chunk) {
  with_element(problem.cache_type, [&](auto element) {
    convert_values<decltype(element)>(problem.value_dim, chunk, scratch.packed_values);
  });
}

// Returns the chunk of the keys [begin, begin + kChunkKeys); keys from `end` on do not count.
inline Chunk chunk_at(const Problem& problem, const Tile& tile, int64_t begin, int64_t end, const Scratch& scratch) {
  return problem.block_size % 16 == 0 ? chunk_of_whole_strips(problem, tile, begin, end)
                                      : chunk_of_single_keys(problem, tile, begin, end, scratch.packed_keys);
}

// The numbers 0 to 63, interleaved from the four strips, because a core reads four streams of memory faster than one.
struct Turns {
  int keys[kChunkKeys];
  constexpr Turns() : keys{} {
    for (int index = 0; index < kChunkKeys; ++index) keys[index] = index % 4 * (kChunkKeys / 4) + index / 4;
  }
};
inline constexpr Turns kTurns;

// Returns the values of the keys whose bit is set; `keys` [kChunkKeys] is room for the keys' numbers.
inline ValuePanel values_of(const Chunk& chunk, uint64_t bits, int* keys) {
  ValuePanel panel{chunk.value_type, kChunkKeys, kTurns.keys, chunk.values, chunk.value_scales, chunk.fetch_next, {}};
  if (panel.fetch)
    for (int strip = 0; strip < kChunkKeys / 16; ++strip) panel.ahead[strip] = chunk.next[strip];
  if (bits == ~uint64_t{0}) return panel;
  panel.keys = keys;
  panel.count = 0;
  for (; bits != 0; bits &= bits - 1) keys[panel.count++] = __builtin_ctzll(bits);
  return panel;
}

}  // namespace sharp::cpu::SHARP_ISA
