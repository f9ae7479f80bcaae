// Attention over contiguous keys and values: packed into blocks, then computed by the paged loops.
#pragma once

#include <algorithm>
#include <vector>

#include "paged_attention.h"
#include "problem.h"

namespace sharp::cpu {

// The keys or the values of a batch: the past's rows, then the new ones.
template <typename Element>
struct ContiguousRows {
  const Element* past;  // [batch, kv_heads, capacity, dim] or null
  int64_t capacity;
  const Element* fresh;  // [batch, kv_heads, new_keys, dim]
  int64_t new_keys, dim;
};

// One call of SharpAttention on the CPU, already checked. `query`, `output` and the rows are float32; `stats` is null
// if statistics are not collected.
struct ContiguousProblem : SharpAttention {
  ContiguousRows<float> keys, values;  // keys.dim is head_dim, values.dim value_dim
  std::vector<int32_t> past;           // [batch] keys before this call
  std::vector<int32_t> total;          // [batch] keys that count, at most past + new_keys

  const float* query_rows() const { return static_cast<const float*>(query); }
  float* output_rows() const { return static_cast<float*>(output); }
};

// Fills output and stats. It allocates about as much memory as keys, values, query and output have.
void contiguous_attention(const ContiguousProblem& problem, const ParallelFor& parallel_for);

// Writes keys or values [batch, kv_heads, places, dim] to `present`: the past, unless `present` is the past's memory,
// then the new rows of sequence b at places past[b] ... total[b] - 1 (all new rows if `limit` is null).
template <typename Element>
void write_present(const ContiguousRows<Element>& rows, int64_t batch, int64_t kv_heads, int64_t places,
                   const std::vector<int32_t>& past, const std::vector<int32_t>* limit, Element* present,
                   const ParallelFor& parallel_for) {
  parallel_for(batch * kv_heads, [&](int64_t pair) {
    const int64_t first = past[pair / kv_heads];
    const int64_t count = limit == nullptr ? rows.new_keys : std::max<int64_t>((*limit)[pair / kv_heads] - first, 0);
    Element* to = present + pair * places * rows.dim;
    if (rows.past != nullptr && present != rows.past)
      std::copy_n(rows.past + pair * rows.capacity * rows.dim, rows.capacity * rows.dim, to);
    std::copy_n(rows.fresh + pair * rows.new_keys * rows.dim, std::min(count, rows.new_keys) * rows.dim,
                to + first * rows.dim);
  });
}

}  // namespace sharp::cpu
