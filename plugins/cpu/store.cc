#include "store.h"

#include <algorithm>
#include <cmath>

#include "half.h"

namespace sharp::cpu {
namespace {

constexpr int64_t kStoreTokens = 64;  // tokens stored by one task

void convert(float from, float& to) { to = from; }
void convert(float from, Float16& to) { to = to_float16(from); }
void convert(float from, Bfloat16& to) { to = to_bfloat16(from); }

template <typename Element>
void store_token(const Problem& problem, int64_t token) {
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
  }
}

int8_t quantize(float value, float inverse) {
  const float scaled = std::min(std::max(std::nearbyint(value * inverse), -127.0f), 127.0f);
  return scaled == scaled ? static_cast<int8_t>(scaled) : 0;  // of a NaN the scale tells
}

// One vector of `channels` numbers, `stride` apart, into a block of `size` numbers. A NaN makes the scale NaN, and with
// it all that the block holds, until offset 0 starts it anew.
void store_int8(const float* from, int64_t channels, bool starts_block, int8_t* block, int64_t size, int8_t* to,
                int64_t stride, float& scale) {
  float largest = 0;
  for (int64_t channel = 0; channel < channels; ++channel) {
    const float size = std::fabs(from[channel]);
    if (!(size <= largest) && largest == largest) largest = size;
  }
  const float needed = largest / 127.0f;
  if (starts_block) {
    scale = needed;
  } else if (!(needed <= scale) && scale == scale) {
    const float ratio = scale / needed;
    for (int64_t index = 0; index < size; ++index) block[index] = quantize(block[index], ratio);
    scale = needed;
  }
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  for (int64_t channel = 0; channel < channels; ++channel) to[channel * stride] = quantize(from[channel], inverse);
}

// In the order of the tokens: a token may change the scale of those before it.
void store_head_int8(const Problem& problem, int64_t head) {
  const int64_t key_size = problem.head_dim * problem.block_size, value_size = problem.block_size * problem.value_dim;
  for (int64_t token = 0; token < problem.tokens; ++token) {
    const int64_t slot = problem.slot_mapping[token];
    if (slot < 0) continue;
    const int64_t offset = slot % problem.block_size, from = token * problem.kv_heads + head;
    const int64_t block = slot / problem.block_size * problem.kv_heads + head;
    int8_t* keys = static_cast<int8_t*>(problem.key_cache) + block * key_size;
    int8_t* values = static_cast<int8_t*>(problem.value_cache) + block * value_size;
    store_int8(problem.key + from * problem.head_dim, problem.head_dim, offset == 0, keys, key_size, keys + offset,
               problem.block_size, problem.key_scale[block]);
    store_int8(problem.value + from * problem.value_dim, problem.value_dim, offset == 0, values, value_size,
               values + offset * problem.value_dim, 1, problem.value_scale[block]);
  }
}

template <typename Element>
void store_elements(const Problem& problem, const ParallelFor& parallel_for) {
  parallel_for((problem.tokens + kStoreTokens - 1) / kStoreTokens, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kStoreTokens, problem.tokens);
    for (int64_t token = task * kStoreTokens; token < end; ++token) store_token<Element>(problem, token);
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
      return parallel_for(problem.kv_heads, [&](int64_t head) { store_head_int8(problem, head); });
    default:
      return store_elements<float>(problem, parallel_for);
  }
}

}  // namespace sharp::cpu
