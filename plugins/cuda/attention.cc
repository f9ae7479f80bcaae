// The functions of SharpAttention in sharp_cuda.h, on the kernels of PagedAttention compiled for contiguous keys.
#include <algorithm>

#include "check.h"
#include "plan.h"

namespace sharp::cuda {
namespace {

// Keys or values of a call: where they come from, and where the kernels read them.
struct Keys {
  const void *fresh, *past;
  void* present;
  int64_t dim;
};

struct Workspace {
  Workspace(const SharpAttention& problem, const Call& call, const SharpScratch& sizes, void* base)
      : buffers(base), scratch(buffers, sizes) {
    query_start = buffers.take(problem.batch + 1, sizeof(int32_t));
    context_lens = buffers.take(problem.batch, sizeof(int32_t));
    counts = buffers.take(problem.batch, sizeof(int32_t));
    // Room for the presents of a call that leaves these outputs out.
    const bool spare = problem.has_past && !problem.has_presents;
    const int64_t slots = spare ? problem.batch * problem.kv_heads * call.slots : 0;
    keys = buffers.take(slots * problem.head_dim, bytes_of(problem.type));
    values = buffers.take(slots * problem.value_dim, bytes_of(problem.type));
  }

  Buffers buffers;
  Scratch scratch;
  void *query_start, *context_lens, *counts, *keys, *values;
};

// Returns the call without the buffers in the workspace.
Call call_of(const SharpAttention& from) {
  Call call{};
  call.contiguous = true;
  call.slots = slots_of(from);
  call.new_keys = from.new_keys;
  call.past = from.shared ? -1 : from.capacity;
  call.stored = from.has_past;
  call.past_lens = from.past_lens;
  call.total_lens = from.total_lens;
  SharpPagedAttention& problem = call.problem;
  problem.attributes = from.attributes;
  problem.tokens = from.batch * from.queries;
  problem.multiprocessors = from.multiprocessors;
  problem.q_heads = from.q_heads;
  problem.kv_heads = from.kv_heads;
  problem.head_dim = from.head_dim;
  problem.value_dim = from.value_dim;
  problem.block_size = Call::kBlockSize;
  problem.sequences = from.batch;
  problem.max_blocks = (call.slots + Call::kBlockSize - 1) / Call::kBlockSize;
  problem.type = problem.cache_type = from.type;
  problem.query = from.query;
  problem.key = from.key;
  problem.value = from.value;
  problem.head_params = from.head_params;
  problem.parameters = from.parameters;
  problem.alibi = from.alibi;
  problem.alibi_slopes = from.alibi_slopes;
  problem.collect_stats = from.stats == nullptr ? nullptr : from.collect_stats;
  problem.output = from.output;
  problem.stats = from.stats;
  check_call(problem);
  return call;
}

void copy_rows(void* to, int64_t to_pitch, const void* from, int64_t bytes, int64_t rows, SharpStream stream) {
  if (bytes == 0 || rows == 0) return;
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = reinterpret_cast<CUdeviceptr>(from);
  copy.srcPitch = copy.WidthInBytes = bytes;
  copy.dstDevice = reinterpret_cast<CUdeviceptr>(to);
  copy.dstPitch = to_pitch;
  copy.Height = rows;
  check(driver().cuMemcpy2DAsync(&copy, stream), "copying the past on the device");
}

// Returns keys or values as the kernels read them, with the past copied there. A kernel writes the new ones.
void* gather(const SharpAttention& problem, const Keys& keys, void* spare, SharpStream stream) {
  const int64_t row = keys.dim * bytes_of(problem.type), pairs = problem.batch * problem.kv_heads;
  if (!problem.has_past) {
    if (keys.present != nullptr)
      copy_rows(keys.present, problem.new_keys * row, keys.fresh, problem.new_keys * row, pairs, stream);
    return const_cast<void*>(keys.fresh);
  }
  void* present = keys.present == nullptr ? spare : keys.present;
  if (present != keys.past)
    copy_rows(present, slots_of(problem) * row, keys.past, problem.capacity * row, pairs, stream);
  return present;
}

}  // namespace
}  // namespace sharp::cuda

using namespace sharp::cuda;
using sharp::check_sizes;
using sharp::slots_of;

SHARP_EXPORT int sharp_cuda_attention_workspace_bytes(const SharpAttention* problem, int or_smaller, size_t* bytes) {
  return status_of([&] {
    check_sizes(*problem);
    const Call call = call_of(*problem);
    const SharpPlan planned = plan(call);
    *bytes = Workspace(*problem, call, or_smaller ? planned.largest : planned.scratch, nullptr).buffers.bytes();
  });
}

SHARP_EXPORT int sharp_cuda_prepare_attention(const SharpAttention* problem) {
  return status_of([&] {
    check_sizes(*problem);
    SharpAttention some = *problem;
    some.batch = 1;
    for (const int64_t queries : {int64_t{1}, kMostTokens + 1, kSomePrompt, kLongPrompt}) {
      some.queries = queries;
      load_kernels(call_of(some));
    }
  });
}

SHARP_EXPORT int sharp_cuda_attention(const SharpAttention* problem, void* workspace, SharpStream stream) {
  return status_of([&] {
    check_sizes(*problem);
    Call call = call_of(*problem);
    if (problem->batch == 0) return;
    require(workspace != nullptr, "the workspace is null");
    require((problem->past_key != nullptr) == (problem->has_past != 0) &&
                (problem->past_value != nullptr) == (problem->has_past != 0) &&
                (problem->past_lens != nullptr) == (problem->shared != 0),
            "has_past or shared says otherwise than the buffers");
    require(!problem->has_past || !problem->has_presents ||
                (problem->present_key != nullptr && problem->present_value != nullptr) || slots_of(*problem) == 0,
            "has_presents says otherwise than the buffers");
    const SharpPlan planned = plan(call);
    const Workspace memory(*problem, call, planned.scratch, workspace);
    call.problem.key_cache = gather(
        *problem, {problem->key, problem->past_key, problem->present_key, problem->head_dim}, memory.keys, stream);
    call.problem.value_cache =
        gather(*problem, {problem->value, problem->past_value, problem->present_value, problem->value_dim},
               memory.values, stream);
    call.problem.query_start = static_cast<const int32_t*>(memory.query_start);
    call.problem.context_lens = static_cast<const int32_t*>(memory.context_lens);
    call.problem.block_table = static_cast<const int32_t*>(memory.counts);
    if (problem->stats != nullptr && call.problem.tokens > 0)
      check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(problem->stats), 0,
                                     problem->batch * problem->q_heads * problem->queries *
                                         problem->attributes.stats_columns * sizeof(float),
                                     stream),
            "clearing statistics");
    launch(call, planned, memory.scratch, stream);
  });
}
