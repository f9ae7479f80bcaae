// A call of the GPU kernels: its plan, its workspace and its launches.
#pragma once

#include <string>

#include "kernels.h"
#include "launch_plan.h"
#include "sharp_cuda.h"

namespace sharp::cuda {

constexpr int64_t kSomePrompt = 64;       // tokens; more than decoding takes from any sequence
constexpr int64_t kLongPrompt = 1 << 20;  // tokens; so many that the keys are never split
constexpr size_t kAlignment = 256;        // bytes, for every buffer in a workspace

// A call of either op. A batch of SharpAttention is a set of sequences with equally many tokens, whose keys are
// contiguous in key_cache and value_cache; query_start, context_lens and block_table are then scratch memory that a
// kernel fills.
struct Call {
  SharpPagedAttention problem;
  bool contiguous = false;
  // The following fields are for contiguous calls only.
  int64_t slots = 0;  // places for keys per head
  int64_t new_keys = 0;
  int64_t past = 0;                     // keys before this call; -1: past_lens has the numbers
  bool stored = false;                  // whether new keys must be written to the slots
  const int32_t* past_lens = nullptr;   // null unless `past` is -1
  const int32_t* total_lens = nullptr;  // null: all keys count

  // Scratch memory for logits is counted in blocks of 16 slots.
  static constexpr int64_t kBlockSize = 16;
};

// Plans a call for the current device, or for the number of multiprocessors that the call names. The kernels whose
// tiles determine the plan are loaded. Throws Error.
SharpPlan plan(const Call& call);

// Returns the name of a function compiled for a call, composed as in plugins/cuda/kernel_set.py.
std::string kernel_name(const Call& call, const std::string& function);

// Loads every kernel that a call launches. Throws Error.
void load_kernels(const Call& call);

// Buffers behind each other in one allocation; a null `base` only computes the size. `take` returns room for `count`
// elements of `size` bytes, at a multiple of kAlignment from `base`, or null.
class Buffers {
 public:
  explicit Buffers(void* base) : base_(static_cast<char*>(base)) {}
  void* take(int64_t count, size_t size) {
    void* taken = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += (count * size + kAlignment - 1) / kAlignment * kAlignment;
    return taken;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

// The part of the workspace that every call needs.
struct Scratch {
  Scratch(Buffers& buffers, const SharpScratch& sizes);

  void* never;  // one byte of 0, for an absent collect_stats
  void *plan, *sums, *outputs, *logits, *solution, *tiles;
};

// Throws Error with `what` unless `holds`.
void require(bool holds, const char* what);

// Throws InputError or Error unless the kernels can compute a call with these attributes and sizes.
void check_call(const SharpPagedAttention& problem);

// Enqueues the launches of a call on the stream. Throws Error, also for a buffer that is null but needed, or that does
// not lie at a multiple of 16 bytes.
void launch(const Call& call, const SharpPlan& plan, const Scratch& scratch, SharpStream stream);

// The error message of this thread's last failed call.
std::string& last_error();

// Runs `work`. Returns 0, or 1 if it throws, with the exception's message in last_error().
template <typename Work>
int status_of(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    last_error() = error.what();
    return 1;
  }
}

}  // namespace sharp::cuda

#define SHARP_EXPORT extern "C" __attribute__((visibility("default")))
