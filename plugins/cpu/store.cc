#include "store.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "half.h"
#include "isa.h"
#include "quantize.h"

namespace sharp::cpu {
namespace {

constexpr int64_t kStoreTokens = 64;  // tokens stored by one task

void convert(float from, float& to) { to = from; }
void convert(float from, Float16& to) { to = to_float16(from); }
void convert(float from, Bfloat16& to) { to = to_bfloat16(from); }

// Stores a token. `stored` [head_dim] is room for a key as the cache holds it; unused if the cache holds floats.
template <typename Element>
void store_token(const Problem& problem, const Loops& loops, int64_t token, float* stored) {
  const int64_t slot = problem.slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / problem.block_size, offset = slot % problem.block_size;
  for (int64_t head = 0; head < problem.kv_heads; ++head) {
    const int64_t from = token * problem.kv_heads + head, to = block * problem.kv_heads + head;
    const float* key = problem.key_rows() + from * problem.head_dim;
    const float* value = problem.value_rows() + from * problem.value_dim;
    Element* column = static_cast<Element*>(problem.key_cache) + to * problem.head_dim * problem.block_size + offset;
    Element* row = static_cast<Element*>(problem.value_cache) + (to * problem.block_size + offset) * problem.value_dim;
    for (int64_t channel = 0; channel < problem.head_dim; ++channel)
      convert(key[channel], column[channel * problem.block_size]);
    for (int64_t channel = 0; channel < problem.value_dim; ++channel) convert(value[channel], row[channel]);
    if (problem.key_screen == nullptr) continue;
    if constexpr (!std::is_same_v<Element, float>)
      for (int64_t channel = 0; channel < problem.head_dim; ++channel)
        stored[channel] = to_float(column[channel * problem.block_size]);
    loops.screen_key(problem, head, to, offset, std::is_same_v<Element, float> ? key : stored);
  }
}

// Returns the largest magnitude; NaN if any number is NaN.
float largest_of(const float* numbers, int64_t count) {
  uint32_t largest = 0;  // magnitudes have the order of their bits, in which NaN comes last
  for (int64_t index = 0; index < count; ++index)
    largest = std::max(largest, detail::bits_of_float(numbers[index]) & 0x7fffffff);
  return detail::float_of_bits(largest);
}

// The store of keys or of values [blocks, kv_heads, ...]: the tokens' numbers, the cache and its scales.
struct ScaledStore {
  const float* from;  // [tokens, kv_heads, channels]
  void* cache;
  float* scale;  // [blocks, kv_heads]
  int64_t channels;
  bool by_channel;  // whether a block is [channels, block_size] or [block_size, channels]
};

// Returns the scale of numbers up to `largest`.
float scale_for(float largest, int8_t) { return largest / 127.0f; }

// Returns the power of two that brings numbers below 256; never subnormal, as a processor may flush that to 0.
float scale_for(float largest, Float8) {
  if (!(largest < std::numeric_limits<float>::infinity())) return std::numeric_limits<float>::quiet_NaN();
  if (largest == 0) return 0;
  const float power = detail::float_of_bits(detail::bits_of_float(largest) & 0x7f800000);
  return std::max(power * 0x1p-7f, std::numeric_limits<float>::min());
}

void quantize_to(float value, float inverse, int8_t& to) { to = quantize(value, inverse); }
void quantize_to(float value, float inverse, Float8& to) { to = to_float8(value * inverse); }

// Stores tokens in their order, because a token may change the scale of earlier tokens in its block. A NaN makes the
// scale NaN, and with it all numbers of the block, until a token at offset 0 starts the block anew.
template <typename Element>
void store_scaled(const Problem& problem, const ScaledStore& store, int64_t head) {
  const int64_t channels = store.channels, size = channels * problem.block_size;
  for (int64_t token = 0; token < problem.tokens; ++token) {
    const int64_t slot = problem.slot_mapping[token];
    if (slot < 0) continue;
    const int64_t offset = slot % problem.block_size;
    const int64_t number = slot / problem.block_size * problem.kv_heads + head;
    const float* from = store.from + (token * problem.kv_heads + head) * channels;
    Element* block = static_cast<Element*>(store.cache) + number * size;
    float& scale = store.scale[number];
    const float needed = scale_for(largest_of(from, channels), Element{});
    if (offset == 0) {
      scale = needed;
    } else if (!(needed <= scale) && scale == scale) {
      const float ratio = scale / needed;
      for (int64_t index = 0; index < size; ++index) quantize_to(to_float(block[index]), ratio, block[index]);
      scale = needed;
    }
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    if (store.by_channel)
      for (int64_t channel = 0; channel < channels; ++channel)
        quantize_to(from[channel], inverse, block[channel * problem.block_size + offset]);
    else
      for (int64_t channel = 0; channel < channels; ++channel)
        quantize_to(from[channel], inverse, block[offset * channels + channel]);
  }
}

template <typename Element>
void store_all_scaled(const Problem& problem, const ParallelFor& parallel_for) {
  const ScaledStore stores[] = {
      {problem.key_rows(), problem.key_cache, problem.key_scale, problem.head_dim, true},
      {problem.value_rows(), problem.value_cache, problem.value_scale, problem.value_dim, false}};
  parallel_for(2 * problem.kv_heads, [&](int64_t task) { store_scaled<Element>(problem, stores[task % 2], task / 2); });
}

template <typename Element>
void store_elements(const Problem& problem, const ParallelFor& parallel_for) {
  const Loops loops = find_loops(problem.attributes);
  parallel_for((problem.tokens + kStoreTokens - 1) / kStoreTokens, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kStoreTokens, problem.tokens);
    std::vector<float> stored(problem.key_screen == nullptr ? 0 : problem.head_dim);
    for (int64_t token = task * kStoreTokens; token < end; ++token)
      store_token<Element>(problem, loops, token, stored.data());
  });
}

}  // namespace

void store_tokens(const Problem& problem, const ParallelFor& parallel_for) {
  switch (problem.cache_type) {
    case SHARP_FLOAT16:
      return store_elements<Float16>(problem, parallel_for);
    case SHARP_BFLOAT16:
      return store_elements<Bfloat16>(problem, parallel_for);
    case SHARP_INT8:
      return store_all_scaled<int8_t>(problem, parallel_for);
    case SHARP_FP8:
      return store_all_scaled<Float8>(problem, parallel_for);
    default:
      return store_elements<float>(problem, parallel_for);
  }
}

}  // namespace sharp::cpu
