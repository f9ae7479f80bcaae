#include "plan.h"

#include <limits>

#include "check.h"

namespace sharp::cuda {
namespace {

constexpr uintptr_t kVectorBytes = 16;  // the alignment that the kernels' loads rely on
SharpPlanRequest request_of(const Call& call) {
  const SharpPagedAttention& problem = call.problem;
  SharpPlanRequest request{};
  request.constants = {kDecodeWaves, kSplitKeys,      kMostSplits, kMostTokens,   kMostRows,       kMostParts,
                       kPartKeys,    kMostPromptRows, kListedKeys, kEntmaxCounts, kSparsemaxCounts};
  request.normalizer = problem.attributes.normalizer;
  request.alpha = problem.attributes.alpha;
  request.contiguous = call.contiguous;
  request.scaled = has_scales(problem.cache_type);
  request.screened = problem.screened;
  request.tokens = problem.tokens;
  request.sequences = problem.sequences;
  request.max_blocks = problem.max_blocks;
  request.block_size = problem.block_size;
  request.q_heads = problem.q_heads;
  request.kv_heads = problem.kv_heads;
  request.value_dim = problem.value_dim;
  request.new_keys = call.new_keys;
  request.multiprocessors = problem.multiprocessors > 0 ? problem.multiprocessors : multiprocessors();
  return request;
}

bool begins(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

}  // namespace

std::string kernel_name(const Call& call, const std::string& function) {
  const SharpPagedAttention& problem = call.problem;
  const SharpAttributes& attributes = problem.attributes;
  std::string name = function;
  for (const std::string& part :
       {std::string(kTypeNames[problem.type]), std::string(kTypeNames[problem.cache_type]),
        std::to_string(problem.head_dim), std::to_string(problem.value_dim), std::to_string(problem.block_size)})
    name += " " + part;
  if (call.contiguous) name += " contiguous";
  if (begins(function, "write")) return name;
  name += std::string(" ") + kNormalizers[attributes.normalizer].name;
  if (begins(function, "merge")) return name;
  const bool prompts = begins(function, "prefill");
  const bool solved = function == "decode_solve" || function == "decode_settled";
  if ((prompts || solved) && attributes.normalizer == SHARP_ENTMAX)
    name += attributes.alpha == 2.0f ? " one" : attributes.alpha == 1.5f ? " two" : " any";
  if (solved) return name;
  if (problem.alibi) name += " alibi";
  if (attributes.softcap != 0) name += " softcap";
  return name;
}

SharpPlan plan(const Call& call) {
  SharpPlanRequest request = request_of(call);
  const char* const first = call.contiguous    ? "write_present"
                            : request.scaled   ? "write_scaled_cache"
                            : request.screened ? "write_screened_cache"
                                               : "write_cache";
  request.decode_rows = tile_of(kernel_name(call, first)).rows;  // this kernel has the tile of decoding, too
  request.prompt_rows = request.prompt_keys = 1;
  if (needs_prompt_tile(request)) {
    const Tile tile = tile_of(kernel_name(call, "prefill"));
    request.prompt_rows = tile.rows;
    request.prompt_keys = tile.keys;
  }
  SharpPlan planned;
  require(sharp_plan(&request, &planned) == 0, "the call cannot be planned");
  return planned;
}

void load_kernels(const Call& call) {
  const SharpPlan planned = plan(call);
  for (int64_t index = 0; index < planned.count; ++index)
    load_kernel(kernel_name(call, planned.launches[index].function));
}

Scratch::Scratch(Buffers& buffers, const SharpScratch& sizes) {
  never = buffers.take(1, 1);
  plan = buffers.take(sizes.plan, sizeof(int32_t));
  sums = buffers.take(sizes.sums, sizeof(float));
  outputs = buffers.take(sizes.outputs, sizeof(float));
  logits = buffers.take(sizes.logits, sizeof(float));
  solution = buffers.take(sizes.solution, sizeof(float));
  tiles = buffers.take(sizes.tiles, sizeof(int32_t));
}

void require(bool holds, const char* what) {
  if (!holds) throw Error(what);
}

void check_call(const SharpPagedAttention& problem) {
  check_attributes(problem.attributes, true);
  sharp::check_sizes(problem);
  require(problem.max_blocks <= (std::numeric_limits<int32_t>::max() - problem.tokens) / problem.block_size,
          "max_blocks * block_size and tokens must together fit 32 bits");
  require(problem.blocks <= std::numeric_limits<int32_t>::max() / problem.block_size,
          "blocks * block_size must fit 32 bits, as slots do");
}

namespace {

void set_buffer(Arguments& arguments, Argument argument, const void* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % kVectorBytes != 0 && argument != Argument::collect_stats)
    throw Error(std::string(kArgumentNames[static_cast<int>(argument)]) + " must lie at a multiple of 16 bytes");
  arguments.set(argument, pointer);
}

void set_number(Arguments& arguments, Argument argument, float number) { arguments.set(argument, number); }
void set_number(Arguments& arguments, Argument argument, int32_t number) { arguments.set(argument, int64_t{number}); }

void set_numbers(Arguments& arguments, const SharpAttributes& attributes) {
#define SHARP_SET(name) set_number(arguments, Argument::name, attributes.name);
  SHARP_ATTRIBUTE_ARGUMENTS(SHARP_SET)
#undef SHARP_SET
}

Arguments arguments_of(const Call& call, const Scratch& scratch, const SharpPlan& plan) {
  const SharpPagedAttention& problem = call.problem;
  const bool sequences = problem.block_table && problem.query_start && problem.context_lens;
  const bool data = problem.query && problem.key && problem.value && problem.key_cache && problem.value_cache;
  require(sequences && (call.contiguous || (data && problem.slot_mapping && problem.stats && problem.output)),
          "a buffer is null that every call needs");
  require(!call.contiguous || ((problem.tokens == 0 || (problem.query && problem.output)) &&
                               (call.new_keys == 0 || (problem.key && problem.value)) &&
                               (call.slots == 0 || (problem.key_cache && problem.value_cache))),
          "a buffer is null that is not empty");
  require(!has_scales(problem.cache_type) || (problem.key_scale && problem.value_scale),
          "an int8 or fp8 cache needs key_scale and value_scale");
  require((problem.parameters > 0) == (problem.head_params != nullptr), "parameters says otherwise than head_params");
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
  arguments.set(Argument::parameters, problem.parameters);
  arguments.set(Argument::shifted, static_cast<int64_t>(problem.key_shift != nullptr));
  arguments.set(Argument::columns, static_cast<int64_t>(attributes.stats_columns));
  set_numbers(arguments, attributes);
  // t0 is the coefficient of the highest power, so a shorter polynomial is filled up with zeros in front.
  const int32_t missing = SHARP_MAX_TEMPERATURE_TERMS - attributes.temperature_terms;
  for (int32_t term = 0; term < SHARP_MAX_TEMPERATURE_TERMS; ++term)
    arguments.set(static_cast<Argument>(static_cast<int>(Argument::t0) + term),
                  term < missing ? 0.0f : attributes.temperature_coefficients[term - missing]);
  return arguments;
}

}  // namespace

void launch(const Call& call, const SharpPlan& plan, const Scratch& scratch, SharpStream stream) {
  Arguments arguments = arguments_of(call, scratch, plan);
  if (call.problem.collect_stats == nullptr)
    check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(scratch.never), 0, 1, stream), "clearing a flag");
  for (int64_t index = 0; index < plan.count; ++index) {
    const SharpLaunch& launch = plan.launches[index];
    arguments.set(Argument::stage, launch.stage);
    launch_kernel(kernel_name(call, launch.function), {launch.grid[0], launch.grid[1], launch.grid[2]}, arguments,
                  stream);
  }
}

std::string& last_error() {
  thread_local std::string words;
  return words;
}

}  // namespace sharp::cuda
