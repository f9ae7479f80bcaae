#include "contiguous_attention.h"

#include <algorithm>

#include "aligned.h"

namespace sharp::cpu {
namespace {

constexpr int64_t kBlockSize = 64;  // a block is a whole chunk of the attention loops

using Buffer = AlignedArray<float>;

const float* row_at(const ContiguousRows<float>& rows, int64_t pair, int64_t past, int64_t position) {
  return position < past ? rows.past + (pair * rows.capacity + position) * rows.dim
                         : rows.fresh + (pair * rows.new_keys + position - past) * rows.dim;
}

// Swaps [batch, heads, queries, dim] and [batch, queries, heads, dim]. The orders are equal if one of the two is 1.
void swap_axes(const float* from, int64_t batch, int64_t rows, int64_t columns, int64_t dim, float* to,
               const ParallelFor& parallel_for) {
  parallel_for(batch * rows, [&](int64_t index) {
    const int64_t sequence = index / rows, row = index % rows;
    for (int64_t column = 0; column < columns; ++column)
      std::copy_n(from + (index * columns + column) * dim, dim,
                  to + ((sequence * columns + column) * rows + row) * dim);
  });
}

// Packs keys (dimension-major) and values (row by row) into block `index` of the sequence.
void pack_block(const ContiguousProblem& problem, int64_t sequence, int64_t index, float* keys, float* values) {
  const int64_t past = problem.past[sequence], begin = index * kBlockSize;
  const int64_t count = std::min<int64_t>(problem.total[sequence] - begin, kBlockSize);
  for (int64_t head = 0; head < problem.kv_heads; ++head) {
    const int64_t pair = sequence * problem.kv_heads + head;
    float* panel = keys + head * problem.keys.dim * kBlockSize;
    for (int64_t place = 0; place < count; ++place) {
      const float* key = row_at(problem.keys, pair, past, begin + place);
      for (int64_t channel = 0; channel < problem.keys.dim; ++channel)
        panel[channel * kBlockSize + place] = key[channel];
      std::copy_n(row_at(problem.values, pair, past, begin + place), problem.values.dim,
                  values + (head * kBlockSize + place) * problem.values.dim);
    }
  }
}

}  // namespace

void contiguous_attention(const ContiguousProblem& problem, const ParallelFor& parallel_for) {
  const int64_t batch = problem.batch, tokens = batch * problem.queries;
  const int32_t longest = batch == 0 ? 0 : *std::max_element(problem.total.begin(), problem.total.end());
  Problem paged{};
  paged.attributes = problem.attributes;
  paged.tokens = tokens;
  paged.q_heads = problem.q_heads;
  paged.kv_heads = problem.kv_heads;
  paged.head_dim = problem.keys.dim;
  paged.value_dim = problem.values.dim;
  paged.block_size = kBlockSize;
  paged.sequences = batch;
  paged.max_blocks = std::max<int64_t>((longest + kBlockSize - 1) / kBlockSize, 1);
  paged.blocks = batch * paged.max_blocks;
  paged.head_params = problem.head_params;
  paged.parameters = problem.parameters;
  paged.sinks = sinks_of(problem);
  paged.alibi_slopes = problem.alibi_slopes;

  const int64_t key_block = problem.kv_heads * problem.keys.dim * kBlockSize;
  const int64_t value_block = problem.kv_heads * problem.values.dim * kBlockSize;
  const Buffer keys = aligned_array<float>(paged.blocks * key_block),
               values = aligned_array<float>(paged.blocks * value_block);
  parallel_for(paged.blocks, [&](int64_t block) {
    pack_block(problem, block / paged.max_blocks, block % paged.max_blocks, keys.get() + block * key_block,
               values.get() + block * value_block);
  });
  paged.key_cache = keys.get();
  paged.value_cache = values.get();

  std::vector<int32_t> block_table(paged.blocks), query_start(batch + 1);
  for (int64_t block = 0; block < paged.blocks; ++block) block_table[block] = static_cast<int32_t>(block);
  for (int64_t sequence = 0; sequence <= batch; ++sequence)
    query_start[sequence] = static_cast<int32_t>(sequence * problem.queries);
  const std::vector<int32_t> slot_mapping(tokens, -1);  // nothing to store: the keys are in their blocks already
  paged.block_table = block_table.data();
  paged.query_start = query_start.data();
  paged.slot_mapping = slot_mapping.data();
  paged.context_lens = problem.past.data();
  paged.total_lens = problem.total.data();

  const bool same_order = problem.queries == 1 || problem.q_heads == 1;
  Buffer query, output, stats;
  paged.query = problem.query;
  paged.output = problem.output;
  paged.stats = problem.stats;
  if (!same_order) {
    query = aligned_array<float>(tokens * problem.q_heads * problem.keys.dim);
    output = aligned_array<float>(tokens * problem.q_heads * problem.values.dim);
    swap_axes(problem.query_rows(), batch, problem.q_heads, problem.queries, problem.keys.dim, query.get(),
              parallel_for);
    paged.query = query.get();
    paged.output = output.get();
    if (problem.stats != nullptr) {
      stats = aligned_array<float>(tokens * problem.q_heads * problem.attributes.stats_columns);
      paged.stats = stats.get();
    }
  }
  paged_attention(paged, parallel_for);
  if (same_order) return;
  swap_axes(paged.output_rows(), batch, problem.queries, problem.q_heads, problem.values.dim, problem.output_rows(),
            parallel_for);
  if (problem.stats != nullptr)
    swap_axes(paged.stats, batch, problem.queries, problem.q_heads, problem.attributes.stats_columns, problem.stats,
              parallel_for);
}

}  // namespace sharp::cpu
