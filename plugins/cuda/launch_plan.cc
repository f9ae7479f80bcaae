#include "launch_plan.h"

#include <algorithm>

namespace sharp {
namespace {

int64_t ceil_div(int64_t number, int64_t by) { return (number + by - 1) / by; }

// The planner of one request.
class Planner {
 public:
  explicit Planner(const SharpPlanRequest& request) : request_(request), constants_(request.constants) {
    group_ = request.q_heads / request.kv_heads;
    room_ = std::max<int64_t>(1, std::min(constants_.most_tokens, constants_.most_rows / group_));
    // With no more tokens than sequences, nearly always one token each, decoding takes every token by itself. Then
    // nothing is left to prefill, whichever sequences the tokens belong to. If some sequence must have too many tokens
    // for decoding, prefill also takes all other sequences of several tokens, and scratch memory stays small.
    by_token_ = request.tokens <= request.sequences;
    most_tokens_ = by_token_ ? 0 : request.tokens <= request.sequences * room_ ? room_ : 1;
    // The maximum tokens of a sequence; contiguous calls have the same number in every sequence.
    longest_ = request.contiguous ? request.tokens / std::max<int64_t>(1, request.sequences) : request.tokens;
    prompts_ = !by_token_ && request.sequences > 0 && longest_ > most_tokens_;
    passes_ = kNormalizers[request.normalizer].passes;
    entmax_ = request.normalizer == SHARP_ENTMAX;
    keys_ = request.max_blocks * request.block_size;
  }

  bool needs_prompt_tile() const { return prompts_ || entmax_; }

  void write(SharpPlan& plan) const {
    const int64_t units = by_token_ ? request_.tokens : request_.sequences;
    const int64_t each = std::max<int64_t>(1, most_tokens_), items = items_of(units, each);
    plan = {};
    plan.units = units;
    plan.workers = workers_of(each);
    plan.items = items;
    plan.most_tokens = most_tokens_;
    plan.parts = parts();
    add_store(plan);
    const bool equally_long = request_.contiguous || request_.sequences == 1;
    if (request_.tokens > 0 && !(equally_long && prompts_)) add_decoding(plan, each);
    if (prompts_) add_prompts(plan);
    const int64_t rows = std::min(request_.tokens, units * each) * request_.q_heads;
    const int64_t of_items = items * each * request_.q_heads;
    const int64_t of_parts = plan.parts > 1 ? request_.tokens * request_.q_heads * plan.parts : 0;
    plan.scratch = scratch(1 + units + items, rows, std::max(of_items, of_parts),
                           std::max(of_items, of_parts * passes_), plan.parts > 1 ? 2 * plan.parts : 1);
    plan.largest = largest();
  }

 private:
  // Returns the number of tiles of decoding for the rows of one unit, over all KV heads.
  int64_t row_tiles(int64_t each) const { return request_.kv_heads * ceil_div(group_ * each, request_.decode_rows); }

  int64_t workers_of(int64_t each) const {
    return ceil_div(constants_.decode_waves * request_.multiprocessors, row_tiles(each));
  }

  int64_t items_of(int64_t count, int64_t each) const {
    const int64_t splits = std::min(ceil_div(keys_, constants_.split_keys), constants_.most_splits);  // per unit
    return std::min(workers_of(each) + std::max<int64_t>(0, count - 1), count * std::max<int64_t>(1, splits));
  }

  int64_t most_parts() const { return std::min(ceil_div(keys_, constants_.part_keys), constants_.most_parts); }

  // Returns more than one part if a prompt has few tiles. The number of tiles is a lower bound: it assumes that one
  // sequence has all tokens except one for each other sequence.
  int64_t parts() const {
    if (!prompts_ || most_parts() <= 1) return 1;
    const int64_t alike = request_.contiguous ? request_.sequences : 1;
    const int64_t tokens = request_.contiguous ? longest_ : request_.tokens - request_.sequences + 1;
    const int64_t at_once = alike * ceil_div(tokens * group_, request_.prompt_rows) * request_.kv_heads;
    return std::max<int64_t>(1, std::min(request_.multiprocessors / at_once, most_parts()));
  }

  int64_t prompt_tiles() const { return request_.tokens * group_ / request_.prompt_rows + request_.sequences; }

  // Adds a launch, unless its grid is empty.
  static void add(SharpPlan& plan, const char* function, int64_t x, int64_t y, int64_t z, int64_t stage = 0) {
    if (x > 0 && y > 0 && z > 0) plan.launches[plan.count++] = {function, {x, y, z}, stage};
  }

  // Adds the kernel that stores the new keys and values; one more program of it makes the plan of decoding.
  void add_store(SharpPlan& plan) const {
    const int64_t rows = request_.decode_rows, heads = request_.kv_heads;
    if (request_.contiguous)
      add(plan, "write_present", std::max<int64_t>(1, ceil_div(request_.new_keys, rows)) + 1, heads,
          request_.sequences);
    else if (request_.scaled)
      add(plan, "write_scaled_cache", request_.tokens + 1, heads, 1);
    else
      add(plan, request_.screened ? "write_screened_cache" : "write_cache", ceil_div(request_.tokens, rows) + 1, heads,
          1);
  }

  void add_decoding(SharpPlan& plan, int64_t each) const {
    const auto by_item = [&](const char* function) { add(plan, function, plan.items, row_tiles(each), 1); };
    const auto by_row = [&](const char* function) { add(plan, function, plan.units * each, request_.q_heads, 1); };
    if (passes_ == 1) {
      by_item("decode_stream");
    } else {
      if (request_.screened) {
        by_item("decode_screen");
        by_item("decode_survivors");
      } else {
        by_item("decode_observe");
      }
      by_row("decode_solve");
      by_item("decode_settled");
    }
    by_row("merge");
  }

  void add_prompts(SharpPlan& plan) const {
    const int64_t tiles = prompt_tiles(), heads = request_.kv_heads;
    int64_t stage = 0;  // the number of the last pass
    if (plan.parts > 1 && passes_ > 1) {
      add(plan, "prefill_observe", tiles, heads, plan.parts);
      const int64_t counts = !entmax_                 ? 0
                             : request_.alpha == 2.0f ? constants_.sparsemax_counts
                                                      : constants_.entmax_counts;
      while (stage < counts) add(plan, "prefill_count", tiles, heads, plan.parts, ++stage);
      // If these launches were not enough, one program per tile goes on until its rows have settled.
      if (entmax_) add(plan, "prefill_count", tiles, heads, 1, ++stage);
      add(plan, "prefill_settled", tiles, heads, plan.parts, ++stage);
    } else {
      add(plan, "prefill", tiles, heads, plan.parts);
    }
    if (plan.parts > 1) add(plan, "merge_prompts", request_.tokens, request_.q_heads, 1, stage);
  }

  // `places` is the room in a tile's lists of keys besides the keys themselves.
  SharpScratch scratch(int64_t planned, int64_t rows, int64_t outputs, int64_t sums, int64_t places) const {
    const int64_t stored = passes_ > 1 ? rows : 0;
    int64_t tiles = 0;
    if (entmax_)
      tiles = request_.kv_heads * prompt_tiles() *
              (ceil_div(keys_, std::max(request_.prompt_keys, constants_.listed_keys)) + places);
    return {planned, sums * 8, outputs * request_.value_dim, stored * keys_, stored * 3, tiles};
  }

  SharpScratch largest() const {
    const int64_t most_units = std::min(request_.tokens, request_.sequences);
    int64_t rows = 0;  // a smaller call may have fewer tokens per sequence, and so more programs per token
    for (int64_t tokens = 1; tokens <= room_; ++tokens)
      rows = std::max(rows, request_.q_heads * tokens * items_of(most_units, tokens));
    // Rows of parts: one tile for every multiprocessor, and the tokens of other sequences.
    const int64_t all_parts = request_.q_heads * most_parts();
    const int64_t of_parts =
        most_parts() > 1
            ? std::min(request_.tokens * all_parts,
                       request_.multiprocessors * constants_.most_prompt_rows + request_.sequences * all_parts)
            : 0;
    return scratch(1 + most_units + items_of(most_units, 1),
                   std::min(request_.tokens, request_.sequences * room_) * request_.q_heads, std::max(rows, of_parts),
                   std::max(rows, of_parts * passes_), 2 * std::max<int64_t>(1, most_parts()));
  }

  const SharpPlanRequest& request_;
  const SharpPlanConstants& constants_;
  int64_t group_, room_, most_tokens_, longest_, passes_, keys_;
  bool by_token_, prompts_, entmax_;
};

}  // namespace

bool needs_prompt_tile(const SharpPlanRequest& request) { return Planner(request).needs_prompt_tile(); }

}  // namespace sharp

extern "C" __attribute__((visibility("default"))) int sharp_plan(const SharpPlanRequest* request, SharpPlan* plan) {
  const bool sound = request->kv_heads > 0 && request->q_heads > 0 && request->q_heads % request->kv_heads == 0 &&
                     request->decode_rows > 0 && request->prompt_rows > 0 && request->constants.split_keys > 0 &&
                     request->constants.part_keys > 0 && request->tokens >= 0 && request->sequences >= 0;
  if (!sound) return 1;
  sharp::Planner(*request).write(*plan);
  return 0;
}
