// Which kernels a call launches, with what grid and scratch memory: plugins/triton/variants.py in C++. A test compares
// the two.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"
#include "sharp_cuda.h"

namespace sharp::cuda {

constexpr int64_t kSomePrompt = 64;       // tokens; more than decoding takes of any sequence
constexpr int64_t kLongPrompt = 1 << 20;  // so many that its keys are never split
constexpr size_t kAlignment = 256;        // bytes, of the buffers in a workspace

// A call of either op. Attention's batch is sequences of equally many tokens, and its keys lie one behind the other in
// key_cache and value_cache; query_start, context_lens and block_table are then scratch memory that a kernel fills.
struct Call {
  SharpPagedAttention problem;
  bool contiguous = false;
  // Of contiguous calls only:
  int64_t slots = 0;  // of a head, for keys
  int64_t new_keys = 0;
  int64_t past = 0;                     // keys before this call; -1: see past_lens
  bool stored = false;                  // whether new keys must be written to the slots
  const int32_t* past_lens = nullptr;   // null unless `past` is -1
  const int32_t* total_lens = nullptr;  // null: all keys count

  // A block for every 16 slots, in which scratch memory for logits is counted.
  static constexpr int64_t kBlockSize = 16;
};

struct Launch {
  std::string kernel;
  Grid grid;
  int64_t stage = 0;  // which of a split prompt's passes it is
};

// The rows of all items, or all rows times parts, in the scratch memory of sums and of outputs.
struct SplitRows {
  int64_t outputs, sums;
};

struct Plan {
  int64_t units;         // what decoding takes together: sequences, or tokens where most_tokens is 0
  int64_t workers;       // programs that their keys are split over, for each tile of heads
  int64_t items;         // most splits of the keys of all units
  int64_t parts;         // of the keys of a prompt's tiles
  int64_t most_tokens;   // of a sequence that decoding takes; 0: it takes tokens, of whatever sequence
  int64_t most_rows;     // of scratch memory, of this call and of any smaller one
  SplitRows most_split;  // of this call and of any smaller one
  int64_t sets_of_sums;  // that a split prompt has
  int64_t most_planned;  // numbers of the plan of a decode step; also of any smaller call
  int64_t listed;        // numbers of tiles that entmax keeps
  std::vector<Launch> launches;
};

// Throws Error.
Plan plan(const Call& call);

// Of this very call.
SplitRows split_rows(const Call& call, const Plan& plan);

// Buffers one behind the other; `base` may be null to learn the size.
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

// What every call needs of a workspace.
struct Scratch {
  Scratch(Buffers& buffers, const Call& call, const Plan& plan, SplitRows rows);

  void* never;  // one byte: collect_stats where there is none
  void *plan, *sums, *outputs, *logits, *solution, *tiles;
};

// Throws Error with `what` unless `holds`.
void require(bool holds, const char* what);

// Throws Error.
void check_sizes(const SharpPagedAttention& problem);

// Puts the work on the stream. Throws Error.
void launch(const Call& call, const Plan& plan, const Scratch& scratch, SharpStream stream);

// Why this thread's last call failed.
std::string& last_error();

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
