// Which kernels a call launches, with what grid and scratch memory: plugins/triton/variants.py in C++. A test compares
// the two.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "sharp_cuda.h"

namespace sharp::cuda {
namespace {

constexpr size_t kAlignment = 256;      // bytes, of the buffers in the workspace
constexpr uintptr_t kVectorBytes = 16;  // what the kernels' loads rely on
const char* const kNormalizers[] = {"softmax", "ssa", "adaptive_softmax", "entmax", "sigmoid", "relu", "relu2"};
const char* const kTypes[] = {"float32", "float16", "bfloat16", "int8"};

int64_t ceil_div(int64_t number, int64_t by) { return (number + by - 1) / by; }

bool solves(const SharpPagedAttention& problem) {
  return problem.attributes.normalizer == SHARP_ADAPTIVE_SOFTMAX || problem.attributes.normalizer == SHARP_ENTMAX;
}

// The names of a problem's kernels, as plugins/cuda/kernel_set.py makes them.
class Names {
 public:
  explicit Names(const SharpPagedAttention& problem)
      : sizes_(std::string(" ") + kTypes[problem.type] + " " + kTypes[problem.cache_type] + " " +
               std::to_string(problem.head_dim) + " " + std::to_string(problem.value_dim) + " " +
               std::to_string(problem.block_size)),
        normalizer_(std::string(" ") + kNormalizers[problem.attributes.normalizer]) {
    if (problem.attributes.normalizer == SHARP_ENTMAX)
      power_ = problem.attributes.alpha == 2.0f ? " one" : problem.attributes.alpha == 1.5f ? " two" : " any";
    if (problem.alibi) features_ += " alibi";
    if (problem.attributes.softcap != 0) features_ += " softcap";
  }

  std::string write_cache() const { return "write_cache" + sizes_; }
  std::string decode_stream() const { return "decode_stream" + sizes_ + normalizer_ + features_; }
  std::string decode_observe() const { return "decode_observe" + sizes_ + normalizer_ + features_; }
  std::string decode_solve() const { return "decode_solve" + sizes_ + normalizer_ + power_; }
  std::string decode_settled() const { return "decode_settled" + sizes_ + normalizer_ + power_; }
  std::string merge() const { return "merge" + sizes_ + normalizer_; }
  std::string prefill() const { return "prefill" + sizes_ + normalizer_ + power_ + features_; }

 private:
  std::string sizes_, normalizer_, power_, features_;
};

struct Launch {
  std::string kernel;
  Grid grid;
};

struct Plan {
  int64_t splits;
  int64_t most_split_rows;  // rows times splits of this call and of any smaller one
  std::vector<Launch> launches;
};

Plan plan(const SharpPagedAttention& problem) {
  const Names names(problem);
  const int64_t group = problem.q_heads / problem.kv_heads;
  const int64_t rows = tile_rows(names.write_cache());  // decoding's too
  const int64_t head_tiles = problem.kv_heads * ceil_div(group, rows);
  const int64_t programs = std::max<int64_t>(1, problem.sequences * head_tiles);
  const int64_t wanted = ceil_div(kDecodeWaves * multiprocessors(), programs);
  const int64_t longest = ceil_div(problem.max_blocks * problem.block_size, kSplitKeys);
  const int64_t splits = std::max<int64_t>(1, std::min({wanted, longest, kMostSplits}));

  const Grid by_split{problem.sequences, head_tiles, splits}, by_row{problem.sequences, problem.q_heads, 1};
  std::vector<Launch> launches = {{names.write_cache(), {ceil_div(problem.tokens, rows), problem.kv_heads, 1}}};
  if (solves(problem)) {
    launches.push_back({names.decode_observe(), by_split});
    launches.push_back({names.decode_solve(), by_row});
    launches.push_back({names.decode_settled(), by_split});
  } else {
    launches.push_back({names.decode_stream(), by_split});
  }
  launches.push_back({names.merge(), by_row});
  if (problem.tokens > 1) {
    const int64_t tiles = problem.tokens * group / tile_rows(names.prefill()) + problem.sequences;
    launches.push_back({names.prefill(), {problem.sequences > 0 ? tiles : 0, problem.kv_heads, 1}});
  }
  const int64_t per_sequence = std::max<int64_t>(1, std::min(longest, kMostSplits));
  const int64_t overall = ceil_div(kDecodeWaves * multiprocessors(), head_tiles) + problem.sequences;
  return {splits, problem.q_heads * std::min(problem.sequences * per_sequence, overall), launches};
}

// The buffers of the workspace, one behind the other; `base` may be null to learn the size.
class Workspace {
 public:
  Workspace(const SharpPagedAttention& problem, int64_t split_rows, void* base) : base_(static_cast<char*>(base)) {
    const int64_t rows = problem.sequences * problem.q_heads;
    never = take(1, 1);
    sums = take(split_rows * 8, sizeof(float));
    outputs = take(split_rows * problem.value_dim, sizeof(float));
    const bool stored = solves(problem);
    logits = take(stored ? rows * problem.max_blocks * problem.block_size : 0, sizeof(float));
    solution = take(stored ? rows * 2 : 0, sizeof(float));
  }

  size_t bytes() const { return bytes_; }

  void* never;  // one byte: collect_stats where there is none
  void *sums, *outputs, *logits, *solution;

 private:
  void* take(int64_t count, size_t size) {
    void* taken = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += (count * size + kAlignment - 1) / kAlignment * kAlignment;
    return taken;
  }

  char* base_;
  size_t bytes_ = 0;
};

void require(bool holds, const char* what) {
  if (!holds) throw Error(what);
}

void check_sizes(const SharpPagedAttention& problem) {
  require(problem.tokens >= 0 && problem.sequences >= 0 && problem.max_blocks >= 0 && problem.blocks >= 0,
          "tokens, sequences, blocks and max_blocks must be 0 or more");
  require(problem.q_heads > 0 && problem.kv_heads > 0 && problem.q_heads % problem.kv_heads == 0,
          "kv_heads must divide q_heads");
  require(problem.head_dim > 0 && problem.value_dim > 0 && problem.block_size > 0,
          "head_dim, value_dim and block_size must be positive");
  require(problem.attributes.normalizer >= SHARP_SOFTMAX && problem.attributes.normalizer <= SHARP_RELU2,
          "there is no such normalizer");
  require(problem.type >= SHARP_FLOAT32 && problem.type <= SHARP_BFLOAT16 && problem.cache_type >= SHARP_FLOAT32 &&
              problem.cache_type <= SHARP_INT8,
          "there is no such type");
  require(
      problem.attributes.temperature_terms >= 0 && problem.attributes.temperature_terms <= SHARP_MAX_TEMPERATURE_TERMS,
      "there are too many temperature_coefficients");
}

void set_buffer(Arguments& arguments, Argument argument, const void* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % kVectorBytes != 0 && argument != Argument::collect_stats)
    throw Error(std::string(kArgumentNames[static_cast<int>(argument)]) + " must lie at a multiple of 16 bytes");
  arguments.set(argument, pointer);
}

Arguments arguments_of(const SharpPagedAttention& problem, const Workspace& workspace, int64_t splits) {
  require(problem.query && problem.key && problem.value && problem.key_cache && problem.value_cache &&
              problem.slot_mapping && problem.block_table && problem.query_start && problem.context_lens &&
              problem.output && problem.stats,
          "a buffer is null that every call needs");
  require(problem.attributes.normalizer != SHARP_SSA || (problem.head_params && problem.head_params_width >= 2),
          "ssa needs head_params [q_heads, 2]: b and n of every head");
  require((problem.alibi != 0) == (problem.alibi_slopes != nullptr), "alibi says otherwise than alibi_slopes");
  const SharpAttributes& attributes = problem.attributes;
  Arguments arguments;
  set_buffer(arguments, Argument::query, problem.query);
  set_buffer(arguments, Argument::key, problem.key);
  set_buffer(arguments, Argument::value, problem.value);
  set_buffer(arguments, Argument::key_cache, problem.key_cache);
  set_buffer(arguments, Argument::value_cache, problem.value_cache);
  set_buffer(arguments, Argument::slot_mapping, problem.slot_mapping);
  set_buffer(arguments, Argument::block_table, problem.block_table);
  set_buffer(arguments, Argument::query_start, problem.query_start);
  set_buffer(arguments, Argument::context_lens, problem.context_lens);
  set_buffer(arguments, Argument::head_params, problem.head_params);
  set_buffer(arguments, Argument::alibi_slopes, problem.alibi_slopes);
  set_buffer(arguments, Argument::collect_stats, problem.collect_stats ? problem.collect_stats : workspace.never);
  set_buffer(arguments, Argument::output, problem.output);
  set_buffer(arguments, Argument::stats, problem.stats);
  set_buffer(arguments, Argument::sums, workspace.sums);
  set_buffer(arguments, Argument::outputs, workspace.outputs);
  set_buffer(arguments, Argument::logits, workspace.logits);
  set_buffer(arguments, Argument::solution, workspace.solution);
  arguments.set(Argument::tokens, problem.tokens);
  arguments.set(Argument::sequences, problem.sequences);
  arguments.set(Argument::q_heads, problem.q_heads);
  arguments.set(Argument::kv_heads, problem.kv_heads);
  arguments.set(Argument::max_blocks, problem.max_blocks);
  arguments.set(Argument::splits, splits);
  arguments.set(Argument::parameters, problem.head_params_width);
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

thread_local std::string last_error;

template <typename Work>
int status_of(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

}  // namespace
}  // namespace sharp::cuda

#define SHARP_EXPORT extern "C" __attribute__((visibility("default")))

SHARP_EXPORT int sharp_cuda_workspace_bytes(const SharpPagedAttention* problem, size_t* bytes) {
  using namespace sharp::cuda;
  return status_of([&] {
    check_sizes(*problem);
    *bytes = Workspace(*problem, plan(*problem).most_split_rows, nullptr).bytes();
  });
}

SHARP_EXPORT int sharp_cuda_prepare(const SharpPagedAttention* problem) {
  using namespace sharp::cuda;
  return status_of([&] {
    check_sizes(*problem);
    SharpPagedAttention of_many_tokens = *problem;
    of_many_tokens.tokens = std::max<int64_t>(problem->tokens, 2);  // a single token needs less
    for (const Launch& launch : plan(of_many_tokens).launches) load_kernel(launch.kernel);
  });
}

SHARP_EXPORT int sharp_cuda_paged_attention(const SharpPagedAttention* problem, void* workspace, SharpStream stream) {
  using namespace sharp::cuda;
  return status_of([&] {
    check_sizes(*problem);
    if (problem->tokens == 0) return;
    require(workspace != nullptr, "the workspace is null");
    const Plan planned = plan(*problem);
    const Workspace buffers(*problem, problem->sequences * problem->q_heads * planned.splits, workspace);
    const Arguments arguments = arguments_of(*problem, buffers, planned.splits);
    if (problem->collect_stats == nullptr)
      check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(buffers.never), 0, 1, stream), "clearing a flag");
    for (const Launch& launch : planned.launches) launch_kernel(launch.kernel, launch.grid, arguments, stream);
  });
}

SHARP_EXPORT int sharp_cuda_copy(void* to, const void* from, size_t bytes, SharpStream stream) {
  using namespace sharp::cuda;
  return status_of([&] {
    check(driver().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), bytes,
                                     stream),
          "copying on the device");
  });
}

SHARP_EXPORT const char* sharp_cuda_last_error(void) { return sharp::cuda::last_error.c_str(); }
