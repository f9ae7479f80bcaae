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

// `stored` [head_dim] is room for a key as the cache holds it, unless it holds floats.
template <typename Element>
void store_token(const Problem& problem, const Loops& loops, int64_t token, float* stored) {
  const int64_t slot = problem.slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / problem.block_size, offset = slot % problem.block_size;
  for (int64_t head = 0; head < problem.kv_heads; ++head) {
    const int64_t from = token * problem.kv_heads + head, to = block * problem.kv_heads + head;
    const float* key = problem.key + from * problem.head_dim;
    const float* value = problem.value + from * problem.value_dim;
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

// The largest magnitude; NaN if there is one.
float largest_of(const float* numbers, int64_t count) {
  uint32_t largest = 0;  // magnitudes are in the order of their bits, and NaN comes last
  for (int64_t index = 0; index < count; ++index)
    largest = std::max(largest, detail::bits_of_float(numbers[index]) & 0x7fffffff);
  return detail::float_of_bits(largest);
}

// Keys or values, [blocks, kv_heads, ...]: where a token's numbers come from, where they go, and their scale.
struct ScaledStore {
  const float* from;  // [tokens, kv_heads, channels]
  void* cache;
  float* scale;  // [blocks, kv_heads]
  int64_t channels;
  bool by_channel;  // a block is [channels, block_size]; else [block_size, channels]
};

// The scale of numbers up to `largest`.
float scale_for(float largest, int8_t) { return largest / 127.0f; }

// A power of two by which they are below 256; no subnormal one, which a processor may take for 0.
float scale_for(float largest, Float8) {
  if (!(largest < std::numeric_limits<float>::infinity())) return std::numeric_limits<float>::quiet_NaN();
  if (largest == 0) return 0;
  const float power = detail::float_of_bits(detail::bits_of_float(largest) & 0x7f800000);
  return std::max(power * 0x1p-7f, std::numeric_limits<float>::min());
}

void quantize_to(float value, float inverse, int8_t& to) { to = quantize(value, inverse); }
void quantize_to(float value, float inverse, Float8& to) { to = to_float8(value * inverse); }

// In the order of the tokens: a token may change the scale of those before it in its block. A NaN makes the scale NaN,
// and with it all that the block holds, until offset 0 starts it anew.
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
  const ScaledStore stores[] = {{problem.key, problem.key_cache, problem.key_scale, problem.head_dim, true},
                                {problem.value, problem.value_cache, problem.value_scale, problem.value_dim, false}};
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
    case CacheType::kFloat16:
      return store_elements<Float16>(problem, parallel_for);
    case CacheType::kBfloat16:
      return store_elements<Bfloat16>(problem, parallel_for);
    case CacheType::kInt8:
      return store_all_scaled<int8_t>(problem, parallel_for);
    case CacheType::kFloat8:
      return store_all_scaled<Float8>(problem, parallel_for);
    default:
      return store_elements<float>(problem, parallel_for);
  }
}

}  // namespace sharp::cpu
