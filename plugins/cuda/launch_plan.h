/* The planner of a call: the kernels that it launches, in order, with grids and scratch memory.
 *
 * A plan depends on shapes, options and the device, never on the content of a buffer, so that launches can be recorded
 * in a CUDA graph. libsharp_cuda.so plans its calls with the planner; the wrappers for PyTorch call the planner in
 * libsharp_ops.so (plugins/triton/launch_plan.py mirrors the structures).
 */
#ifndef SHARP_LAUNCH_PLAN_H
#define SHARP_LAUNCH_PLAN_H

#include "sharp_op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The constants that the kernels were compiled with; launch_plan.py and options.py document them. */
typedef struct {
  int64_t decode_waves, split_keys, most_splits, most_tokens, most_rows, most_parts, part_keys, most_prompt_rows,
      listed_keys, entmax_counts, sparsemax_counts;
} SharpPlanConstants;

/* The shapes, options and device of a call, from which its plan follows. */
typedef struct {
  SharpPlanConstants constants;
  SharpNormalizer normalizer;
  float alpha;
  int32_t contiguous;        /* the op is SharpAttention; its batch is a set of sequences with equally many tokens */
  int32_t scaled, screened;  /* whether the cache has scales, whether it has a key screen */
  int64_t tokens, sequences; /* totals of the call */
  int64_t max_blocks, block_size, q_heads, kv_heads, value_dim;
  int64_t new_keys; /* per sequence; contiguous calls only */
  int64_t multiprocessors;
  int64_t decode_rows;              /* rows of a tile of decoding */
  int64_t prompt_rows, prompt_keys; /* rows and keys of a tile of prefill */
} SharpPlanRequest;

/* A launch of a kernel. */
typedef struct {
  const char* function; /* a function in plugins/triton */
  int64_t grid[3];
  int64_t stage; /* the number of a split prompt's pass */
} SharpLaunch;

/* The number of 32-bit words in each scratch buffer. */
typedef struct {
  int64_t plan, sums, outputs, logits, solution, tiles;
} SharpScratch;

enum { SHARP_MOST_LAUNCHES = 24 };

/* The launches of a call in order, and the sizes that they share. */
typedef struct {
  int64_t units;                 /* units of decoding: sequences, or tokens if most_tokens is 0 */
  int64_t workers;               /* programs that the units' keys are split over, for each tile of heads */
  int64_t items;                 /* maximum number of splits of the keys of all units */
  int64_t parts;                 /* parts of the keys of a prompt's tile */
  int64_t most_tokens;           /* maximum tokens of a decoded sequence; 0: units are tokens of any sequence */
  SharpScratch scratch, largest; /* for this call; for this and any smaller call */
  int64_t count;
  SharpLaunch launches[SHARP_MOST_LAUNCHES];
} SharpPlan;

/* Plan a call. Returns 0, or 1 if the request is not valid. */
int sharp_plan(const SharpPlanRequest* request, SharpPlan* plan);

#ifdef __cplusplus
}

#include <functional>

namespace sharp {

struct PromptTile {
  int64_t rows, keys;
};

// Whether a call launches kernels of prompts, or has scratch memory for them; other calls do not need their tile.
bool needs_prompt_tile(const SharpPlanRequest& request);

}  // namespace sharp
#endif

#endif
