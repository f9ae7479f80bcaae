#include "reach.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sharp::cpu {
namespace {

constexpr double kSlack = 1.001;  // covers all rounding errors of norms, logits and biases in float
constexpr int64_t kEverything = std::numeric_limits<int32_t>::max();

// Returns an upper bound of the length of all keys in these blocks; infinity if it is not known.
double longest_key(const Problem& problem, const int32_t* table, int64_t blocks, int64_t kv_head) {
  if (!has_scales(problem.cache_type)) {
    const double bound = problem.attributes.key_bound;
    return bound > 0 ? bound : std::numeric_limits<double>::infinity();
  }
  double longest = 0;
  for (int64_t index = 0; index < blocks; ++index) {
    if (table[index] < 0) continue;
    const double bound = problem.key_scale[table[index] * problem.kv_heads + kv_head];
    if (!(bound <= longest)) longest = bound;
    if (longest != longest) return std::numeric_limits<double>::infinity();
  }
  return longest * (problem.cache_type == SHARP_INT8 ? 127 : 448) * std::sqrt(static_cast<double>(problem.head_dim));
}

// Returns the distance from the query at `position` to the newest of `total` keys that the block table maps.
int64_t newest_distance(const Problem& problem, const int32_t* table, int64_t position, int64_t total) {
  for (int64_t key = std::min(position, total - 1); key >= 0; --key)
    if (table[key / problem.block_size] >= 0) return position - key;
  return 0;
}

}  // namespace

std::vector<int64_t> reach_of(const Problem& problem) {
  const SharpAttributes& attributes = problem.attributes;
  const bool bounded = attributes.key_bound > 0 || has_scales(problem.cache_type) || attributes.softcap > 0;
  // Without causal attention there are keys after the query, which this bound does not cover.
  if (attributes.normalizer != SHARP_ENTMAX || problem.alibi_slopes == nullptr || problem.stats != nullptr ||
      !attributes.causal || !bounded)
    return {};
  std::vector<int64_t> reach(problem.tokens * problem.q_heads, kEverything);
  for (int64_t sequence = 0; sequence < problem.sequences; ++sequence) {
    const int64_t first = problem.query_start[sequence], end = problem.query_start[sequence + 1];
    const int64_t total = problem.total(sequence);
    const int32_t* table = problem.block_table + sequence * problem.max_blocks;
    const int64_t blocks = (total + problem.block_size - 1) / problem.block_size;
    for (int64_t kv_head = 0; kv_head < problem.kv_heads && end > first; ++kv_head) {
      const double longest = longest_key(problem, table, blocks, kv_head);
      for (int64_t token = first; token < end; ++token) {
        const int64_t newest = newest_distance(problem, table, problem.context_lens[sequence] + token - first, total);
        for (int64_t head = kv_head * problem.group(); head < (kv_head + 1) * problem.group(); ++head) {
          const double slope = problem.alibi_slopes[head];
          const float* query = problem.query_rows() + (token * problem.q_heads + head) * problem.head_dim;
          double square = 0;
          for (int64_t channel = 0; channel < problem.head_dim; ++channel) square += query[channel] * query[channel];
          double bound = std::fabs(attributes.scale) * std::sqrt(square) * longest;
          // A query with NaN or infinity must make its row NaN, however far the keys are.
          if (attributes.softcap > 0 && square < std::numeric_limits<double>::infinity() &&
              !(bound < attributes.softcap))
            bound = attributes.softcap;
          const double distance = (2 * bound + 1 / (attributes.alpha - 1.0)) / slope * kSlack + newest + 2;
          if (slope > 0 && distance < kEverything)
            reach[token * problem.q_heads + head] = static_cast<int64_t>(distance);
        }
      }
    }
  }
  return reach;
}

}  // namespace sharp::cpu
