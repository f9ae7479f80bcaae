#include "plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "sharp_head_params.h"

namespace sharp::cuda {
namespace {

constexpr uintptr_t kVectorBytes = 16;  // what the kernels' loads rely on
const char* const kNormalizers[] = {"softmax", "ssa",   "adaptive_softmax", "entmax", "sigmoid",
                                    "relu",    "relu2", "softpick"};
const char* const kTypes[] = {"float32", "float16", "bfloat16", "int8", "fp8"};

// Whether a cache of the type has scales.
bool scaled(SharpType type) { return type == SHARP_INT8 || type == SHARP_FP8; }

int64_t ceil_div(int64_t number, int64_t by) { return (number + by - 1) / by; }

bool solves(const SharpPagedAttention& problem) {
  return problem.attributes.normalizer == SHARP_ADAPTIVE_SOFTMAX || problem.attributes.normalizer == SHARP_ENTMAX;
}

// The names of a problem's kernels, as plugins/cuda/kernel_set.py makes them.
class Names {
 public:
  explicit Names(const Call& call) : Names(call.problem, call.contiguous) {}
  Names(const SharpPagedAttention& problem, bool contiguous)
      : first_(contiguous                   ? "write_present"
               : scaled(problem.cache_type) ? "write_scaled_cache"
               : problem.screened           ? "write_screened_cache"
                                            : "write_cache"),
        sizes_(std::string(" ") + kTypes[problem.type] + " " + kTypes[problem.cache_type] + " " +
               std::to_string(problem.head_dim) + " " + std::to_string(problem.value_dim) + " " +
               std::to_string(problem.block_size) + (contiguous ? " contiguous" : "")),
        normalizer_(std::string(" ") + kNormalizers[problem.attributes.normalizer]) {
    if (problem.attributes.normalizer == SHARP_ENTMAX)
      power_ = problem.attributes.alpha == 2.0f ? " one" : problem.attributes.alpha == 1.5f ? " two" : " any";
    if (problem.alibi) features_ += " alibi";
    if (problem.attributes.softcap != 0) features_ += " softcap";
  }

  std::string first() const { return first_ + sizes_; }
  std::string decode_stream() const { return "decode_stream" + sizes_ + normalizer_ + features_; }
  std::string decode_observe() const { return "decode_observe" + sizes_ + normalizer_ + features_; }
  std::string decode_screen() const { return "decode_screen" + sizes_ + normalizer_ + features_; }
  std::string decode_survivors() const { return "decode_survivors" + sizes_ + normalizer_ + features_; }
  std::string decode_solve() const { return "decode_solve" + sizes_ + normalizer_ + power_; }
  std::string decode_settled() const { return "decode_settled" + sizes_ + normalizer_ + power_; }
  std::string merge() const { return "merge" + sizes_ + normalizer_; }
  std::string merge_prompts() const { return "merge_prompts" + sizes_ + normalizer_; }
  std::string prefill() const { return prefill("prefill"); }
  std::string prefill_observe() const { return prefill("prefill_observe"); }
  std::string prefill_count() const { return prefill("prefill_count"); }
  std::string prefill_settled() const { return prefill("prefill_settled"); }

 private:
  std::string prefill(const char* function) const { return function + sizes_ + normalizer_ + power_ + features_; }

  std::string first_, sizes_, normalizer_, power_, features_;
};

}  // namespace

Plan plan(const Call& call) {
  const SharpPagedAttention& problem = call.problem;
  const Names names(call);
  const int64_t processors = problem.multiprocessors > 0 ? problem.multiprocessors : multiprocessors();
  const int64_t group = problem.q_heads / problem.kv_heads;
  const int64_t rows = tile_of(names.first()).rows;  // decoding's too
  const int64_t room = std::max<int64_t>(1, std::min(kMostTokens, kMostRows / group));
  const bool by_token = problem.tokens <= problem.sequences;
  const int64_t most_tokens = by_token ? 0 : problem.tokens <= problem.sequences * room ? room : 1;
  const int64_t units = by_token ? problem.tokens : problem.sequences;
  const auto row_tiles = [&](int64_t each) { return problem.kv_heads * ceil_div(group * each, rows); };
  const auto workers_of = [&](int64_t each) { return ceil_div(kDecodeWaves * processors, row_tiles(each)); };
  const int64_t longest = ceil_div(problem.max_blocks * problem.block_size, kSplitKeys);
  const int64_t most_splits = std::max<int64_t>(1, std::min(longest, kMostSplits));  // of a unit
  const auto items_of = [&](int64_t count, int64_t each) {
    return std::min(workers_of(each) + std::max<int64_t>(0, count - 1), count * most_splits);
  };
  const int64_t each = std::max<int64_t>(1, most_tokens), workers = workers_of(each), items = items_of(units, each);
  const Grid by_item{items, row_tiles(each), 1};
  const Grid by_row{units * each, problem.q_heads, 1};
  std::vector<Launch> launches;
  const int64_t stores = call.contiguous              ? std::max<int64_t>(1, ceil_div(call.new_keys, rows))
                         : scaled(problem.cache_type) ? problem.tokens
                                                      : ceil_div(problem.tokens, rows);
  // One more program makes the plan.
  launches.push_back({names.first(), {stores + 1, problem.kv_heads, call.contiguous ? problem.sequences : 1}});
  // The most tokens that a sequence may have, which of contiguous calls is known here.
  const int64_t longest_chunk =
      call.contiguous ? problem.tokens / std::max<int64_t>(1, problem.sequences) : problem.tokens;
  const bool prompts = !by_token && problem.sequences > 0 && longest_chunk > most_tokens;
  const bool equally_long = call.contiguous || problem.sequences == 1;
  const bool decodes = problem.tokens > 0 && !(equally_long && prompts);
  if (decodes) {
    if (solves(problem)) {
      if (problem.screened) {
        launches.push_back({names.decode_screen(), by_item});
        launches.push_back({names.decode_survivors(), by_item});
      } else {
        launches.push_back({names.decode_observe(), by_item});
      }
      launches.push_back({names.decode_solve(), by_row});
      launches.push_back({names.decode_settled(), by_item});
    } else {
      launches.push_back({names.decode_stream(), by_item});
    }
    launches.push_back({names.merge(), by_row});
  }
  const bool entmax = problem.attributes.normalizer == SHARP_ENTMAX;
  const int64_t most_parts = std::min(ceil_div(problem.max_blocks * problem.block_size, kPartKeys), kMostParts);
  const int64_t sets_of_sums = entmax ? 3 : solves(problem) ? 2 : 1;
  int64_t parts = 1, listed = 0;
  if (prompts || entmax) {
    const Tile tile = tile_of(names.prefill());
    const int64_t tiles = problem.tokens * group / tile.rows + problem.sequences;
    if (prompts && most_parts > 1) {
      const int64_t alike = call.contiguous ? problem.sequences : 1;
      const int64_t tokens = call.contiguous ? longest_chunk : problem.tokens - problem.sequences + 1;
      const int64_t at_once = alike * ceil_div(tokens * group, tile.rows) * problem.kv_heads;
      parts = std::max<int64_t>(1, std::min(processors / at_once, most_parts));
    }
    const Grid by_part{tiles, problem.kv_heads, parts};
    int64_t stage = 0;  // of the last pass
    if (parts > 1 && solves(problem)) {
      launches.push_back({names.prefill_observe(), by_part});
      const int64_t counts = !entmax ? 0 : problem.attributes.alpha == 2.0f ? kSparsemaxCounts : kEntmaxCounts;
      while (stage < counts) launches.push_back({names.prefill_count(), by_part, ++stage});
      // One program of each tile goes on where they were not enough.
      if (entmax) launches.push_back({names.prefill_count(), {tiles, problem.kv_heads, 1}, ++stage});
      launches.push_back({names.prefill_settled(), by_part, ++stage});
    } else if (prompts) {
      launches.push_back({names.prefill(), by_part});
    }
    if (parts > 1) launches.push_back({names.merge_prompts(), {problem.tokens, problem.q_heads, 1}, stage});
    const int64_t listed_keys = std::max<int64_t>(tile.keys, kListedKeys);
    // The lists of all parts, each with its length and a place that is read behind it; also of any smaller call.
    const int64_t places =
        ceil_div(problem.max_blocks * problem.block_size, listed_keys) + 2 * std::max<int64_t>(1, most_parts);
    if (entmax) listed = problem.kv_heads * tiles * places;
  }
  const int64_t most_rows = std::min(problem.tokens, problem.sequences * room);
  const int64_t most_units = std::min(problem.tokens, problem.sequences);
  int64_t most_split_rows = 0;  // a smaller call may have fewer tokens of each sequence, and so more programs for each
  for (int64_t tokens = 1; tokens <= room; ++tokens)
    most_split_rows = std::max(most_split_rows, problem.q_heads * tokens * items_of(most_units, tokens));
  // Those of parts: of a tile for every multiprocessor, and of the tokens that other sequences have.
  const int64_t all_parts = problem.q_heads * most_parts;
  const int64_t most_part_rows = most_parts > 1 ? std::min(problem.tokens * all_parts,
                                                           processors * kMostPromptRows + problem.sequences * all_parts)
                                                : 0;
  return {units,
          workers,
          items,
          parts,
          most_tokens,
          most_rows * problem.q_heads,
          {std::max(most_split_rows, most_part_rows), std::max(most_split_rows, most_part_rows * sets_of_sums)},
          sets_of_sums,
          1 + most_units + items_of(most_units, 1),
          listed,
          launches};
}

SplitRows split_rows(const Call& call, const Plan& plan) {
  const SharpPagedAttention& problem = call.problem;
  const int64_t of_items = plan.items * std::max<int64_t>(1, plan.most_tokens) * problem.q_heads;
  const int64_t of_prompts = plan.parts > 1 ? problem.tokens * problem.q_heads * plan.parts : 0;
  return {std::max(of_items, of_prompts), std::max(of_items, of_prompts * plan.sets_of_sums)};
}

Scratch::Scratch(Buffers& buffers, const Call& call, const Plan& plan, SplitRows rows) {
  const SharpPagedAttention& problem = call.problem;
  never = buffers.take(1, 1);
  this->plan = buffers.take(plan.most_planned, sizeof(int32_t));
  sums = buffers.take(rows.sums * 8, sizeof(float));
  outputs = buffers.take(rows.outputs * problem.value_dim, sizeof(float));
  const int64_t stored = solves(problem) ? plan.most_rows : 0;
  logits = buffers.take(stored * problem.max_blocks * problem.block_size, sizeof(float));
  solution = buffers.take(stored * 3, sizeof(float));
  tiles = buffers.take(plan.listed, sizeof(int32_t));
}

void require(bool holds, const char* what) {
  if (!holds) throw Error(what);
}

void check_sizes(const SharpPagedAttention& problem) {
  require(problem.tokens >= 0 && problem.sequences >= 0 && problem.max_blocks >= 0 && problem.blocks >= 0 &&
              problem.multiprocessors >= 0,
          "tokens, sequences, blocks, max_blocks and multiprocessors must be 0 or more");
  require(problem.q_heads > 0 && problem.kv_heads > 0 && problem.q_heads % problem.kv_heads == 0,
          "kv_heads must divide q_heads");
  require(problem.head_dim > 0 && problem.value_dim > 0 && problem.block_size > 0,
          "head_dim, value_dim and block_size must be positive");
  require(problem.max_blocks <= (std::numeric_limits<int32_t>::max() - problem.tokens) / problem.block_size,
          "max_blocks * block_size and tokens must together fit 32 bits");
  require(problem.blocks <= std::numeric_limits<int32_t>::max() / problem.block_size,
          "blocks * block_size must fit 32 bits, as slots do");
  require(problem.attributes.normalizer >= SHARP_SOFTMAX && problem.attributes.normalizer <= SHARP_SOFTPICK,
          "there is no such normalizer");
  require(problem.type >= SHARP_FLOAT32 && problem.type <= SHARP_BFLOAT16 && problem.cache_type >= SHARP_FLOAT32 &&
              problem.cache_type <= SHARP_FP8,
          "there is no such type");
  require(!problem.screened || (problem.attributes.normalizer == SHARP_ENTMAX && !scaled(problem.cache_type)),
          "only entmax over a cache of floats has a key screen");
  require(problem.attributes.normalizer != SHARP_ENTMAX || problem.attributes.alpha <= 4,
          "entmax on a GPU takes an alpha of at most 4");
  require(problem.attributes.scale > 0 && std::isfinite(problem.attributes.scale),
          "scale must be positive and finite on a GPU");
  require(
      problem.attributes.temperature_terms >= 0 && problem.attributes.temperature_terms <= SHARP_MAX_TEMPERATURE_TERMS,
      "there are too many temperature_coefficients");
  require(problem.attributes.stats_columns == 4 || problem.attributes.stats_columns == 5,
          "stats_columns must be 4, or 5 with the sink's mass");
}

namespace {

void set_buffer(Arguments& arguments, Argument argument, const void* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % kVectorBytes != 0 && argument != Argument::collect_stats)
    throw Error(std::string(kArgumentNames[static_cast<int>(argument)]) + " must lie at a multiple of 16 bytes");
  arguments.set(argument, pointer);
}

Arguments arguments_of(const Call& call, const Scratch& scratch, const Plan& plan) {
  const SharpPagedAttention& problem = call.problem;
  const bool sequences = problem.block_table && problem.query_start && problem.context_lens;
  const bool data = problem.query && problem.key && problem.value && problem.key_cache && problem.value_cache;
  require(sequences && (call.contiguous || (data && problem.slot_mapping && problem.stats && problem.output)),
          "a buffer is null that every call needs");
  require(!call.contiguous || ((problem.tokens == 0 || (problem.query && problem.output)) &&
                               (call.new_keys == 0 || (problem.key && problem.value)) &&
                               (call.slots == 0 || (problem.key_cache && problem.value_cache))),
          "a buffer is null that is not empty");
  require(!scaled(problem.cache_type) || (problem.key_scale && problem.value_scale),
          "an int8 or fp8 cache needs key_scale and value_scale");
  const int64_t columns = problem.head_params == nullptr ? 0 : problem.head_params_width;
  const char* mistake = sharp_head_params_mistake(problem.attributes.normalizer, columns);
  require(mistake == nullptr, mistake);
  require((problem.screened != 0) == (problem.key_screen != nullptr), "screened says otherwise than key_screen");
  require((problem.alibi != 0) == (problem.alibi_slopes != nullptr), "alibi says otherwise than alibi_slopes");
  const SharpAttributes& attributes = problem.attributes;
  Arguments arguments;
  set_buffer(arguments, Argument::query, problem.query);
  set_buffer(arguments, Argument::key, problem.key);
  set_buffer(arguments, Argument::value, problem.value);
  set_buffer(arguments, Argument::key_cache, problem.key_cache);
  set_buffer(arguments, Argument::value_cache, problem.value_cache);
  set_buffer(arguments, Argument::key_scale, problem.key_scale);
  set_buffer(arguments, Argument::value_scale, problem.value_scale);
  set_buffer(arguments, Argument::key_screen, problem.key_screen);
  set_buffer(arguments, Argument::key_shift, problem.key_shift);
  set_buffer(arguments, Argument::past_lens, call.past_lens);
  set_buffer(arguments, Argument::total_lens, call.total_lens);
  set_buffer(arguments, Argument::slot_mapping, problem.slot_mapping);
  set_buffer(arguments, Argument::block_table, problem.block_table);
  set_buffer(arguments, Argument::query_start, problem.query_start);
  set_buffer(arguments, Argument::context_lens, problem.context_lens);
  set_buffer(arguments, Argument::head_params, problem.head_params);
  set_buffer(arguments, Argument::alibi_slopes, problem.alibi_slopes);
  set_buffer(arguments, Argument::collect_stats, problem.collect_stats ? problem.collect_stats : scratch.never);
  set_buffer(arguments, Argument::output, problem.output);
  set_buffer(arguments, Argument::stats, problem.stats);
  set_buffer(arguments, Argument::plan, scratch.plan);
  set_buffer(arguments, Argument::sums, scratch.sums);
  set_buffer(arguments, Argument::outputs, scratch.outputs);
  set_buffer(arguments, Argument::logits, scratch.logits);
  set_buffer(arguments, Argument::solution, scratch.solution);
  set_buffer(arguments, Argument::tiles, scratch.tiles);
  arguments.set(Argument::tokens, problem.tokens);
  arguments.set(Argument::sequences, problem.sequences);
  arguments.set(Argument::q_heads, problem.q_heads);
  arguments.set(Argument::kv_heads, problem.kv_heads);
  arguments.set(Argument::max_blocks, problem.max_blocks);
  arguments.set(Argument::slots, call.contiguous ? call.slots : problem.blocks * problem.block_size);
  arguments.set(Argument::new_keys, call.new_keys);
  arguments.set(Argument::past, call.past);
  arguments.set(Argument::counted, static_cast<int64_t>(call.total_lens != nullptr));
  arguments.set(Argument::stored, static_cast<int64_t>(call.stored));
  arguments.set(Argument::units, plan.units);
  arguments.set(Argument::workers, plan.workers);
  arguments.set(Argument::items, plan.items);
  arguments.set(Argument::parts, plan.parts);
  arguments.set(Argument::most_tokens, plan.most_tokens);
  arguments.set(Argument::parameters, columns);
  arguments.set(Argument::shifted, static_cast<int64_t>(problem.key_shift != nullptr));
  arguments.set(Argument::columns, static_cast<int64_t>(attributes.stats_columns));
  arguments.set(Argument::window, static_cast<int64_t>(attributes.window));
  arguments.set(Argument::causal, static_cast<int64_t>(attributes.causal));
  arguments.set(Argument::scale, attributes.scale);
  arguments.set(Argument::softcap, attributes.softcap);
  arguments.set(Argument::alpha, attributes.alpha);
  arguments.set(Argument::entropy_threshold, attributes.entropy_threshold);
  // t0 has the highest power; a shorter polynomial has zeros in front.
  const int32_t missing = SHARP_MAX_TEMPERATURE_TERMS - attributes.temperature_terms;
  for (int32_t term = 0; term < SHARP_MAX_TEMPERATURE_TERMS; ++term)
    arguments.set(static_cast<Argument>(static_cast<int>(Argument::t0) + term),
                  term < missing ? 0.0f : attributes.temperature_coefficients[term - missing]);
  return arguments;
}

}  // namespace

void launch(const Call& call, const Plan& plan, const Scratch& scratch, SharpStream stream) {
  Arguments arguments = arguments_of(call, scratch, plan);
  if (call.problem.collect_stats == nullptr)
    check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(scratch.never), 0, 1, stream), "clearing a flag");
  for (const Launch& launch : plan.launches) {
    arguments.set(Argument::stage, launch.stage);
    launch_kernel(launch.kernel, launch.grid, arguments, stream);
  }
}

std::string& last_error() {
  thread_local std::string words;
  return words;
}

}  // namespace sharp::cuda
