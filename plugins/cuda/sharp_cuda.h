/* libsharp_cuda.so: PagedAttention, SharpAttention and sampling on NVIDIA GPUs, for callers with a stream and device
 * buffers.
 *
 * No function synchronizes or allocates on the device, except that a kernel is loaded when it is first needed.
 * sharp_cuda_prepare loads kernels beforehand, so that a stream may be captured into a CUDA graph. The caller's context
 * must be current. Every function that returns an int returns 0, or 1 with the reason in sharp_cuda_last_error().
 */
#ifndef SHARP_CUDA_H
#define SHARP_CUDA_H

#include <stddef.h>
#include <stdint.h>

#include "sharp_op.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st* SharpStream; /* a CUstream, which is a cudaStream_t */

/* The facts of a GPU that determine grids and scratch memory; 90 is compute capability 9.0. */
typedef struct {
  int32_t multiprocessors, compute_capability;
} SharpDevice;

/* Calls are SharpPagedAttention and SharpAttention of sharp_op.h, with all buffers in device memory. Caches, scales and
 * key screen are updated in place. In SharpAttention the keys of a sequence are the past's keys, then the new keys.
 * Without a past (`capacity` 0, no past_key) the keys are `key`. With past_lens the past is a buffer, and new keys that
 * count are written behind its filled slots; keys without a free slot are dropped. Otherwise past and key are joined.
 */

/* The change of a logit before its row is sampled: + bias (-infinity masks it), then / repetition if it is positive and
 * * repetition otherwise, then - amount. */
typedef struct {
  int32_t token;
  float bias, repetition, amount;
} SharpChange;

/* A sampling call, as plugins/cpu/sampling.py defines it; pointers are to memory that the device reads and writes. */
typedef struct {
  int64_t rows, vocab;
  float* logits;              /* [any, vocab], changed in place */
  const int64_t* indices;     /* [rows]: rows of the logits; a row with changes occurs once */
  const double* samplings;    /* [rows, 5]: sharpness, top_k, top_p, min_p, random */
  const int32_t* starts;      /* [2 rows + 1]: the first changes of each row's two parts */
  const SharpChange* changes; /* a part names a token once; tokens outside [0, vocab) are ignored */
  float* candidates;          /* [rows, SHARP_SAMPLING_CANDIDATES], scratch memory */
  int64_t* sampled;           /* [rows]; -1 if the row's highest logit is not finite */
} SharpSampling;

enum { SHARP_SAMPLING_CANDIDATES = 4096 };

/* Compute the bytes of device memory, aligned to 256, for a call of this size or, if `or_smaller` is not 0, for every
 * call with these types and attributes and with sizes up to these. Buffers may be null. */
int sharp_cuda_workspace_bytes(const SharpPagedAttention* problem, int or_smaller, size_t* bytes);

/* Load every kernel that such a call launches. Buffers may be null. */
int sharp_cuda_prepare(const SharpPagedAttention* problem);

/* Enqueue a call of PagedAttention on the stream. `workspace` is device memory of the size that
 * sharp_cuda_workspace_bytes computes; all buffers must lie at multiples of 16 bytes. */
int sharp_cuda_paged_attention(const SharpPagedAttention* problem, void* workspace, SharpStream stream);

/* Workspace, loading and calls of SharpAttention. */
int sharp_cuda_attention_workspace_bytes(const SharpAttention* problem, int or_smaller, size_t* bytes);
int sharp_cuda_prepare_attention(const SharpAttention* problem);
int sharp_cuda_attention(const SharpAttention* problem, void* workspace, SharpStream stream);

/* Load the kernel that samples; enqueue a sampling call on the stream. */
int sharp_cuda_prepare_sampling(void);
int sharp_cuda_sample(const SharpSampling* sampling, SharpStream stream);

/* Add the kernels of a folder, which `sharp build --backend cuda` or `make kernels` wrote, for the rest of the process.
 * Built-in kernels take precedence. */
int sharp_cuda_add_kernels(const char* folder);

/* Return 0 if there is machine code or PTX of a kernel for a compute capability (90 is 9.0), otherwise 1. */
int sharp_cuda_find_kernel(const char* kernel, int32_t compute_capability);

/* Describe the current device. Memory that was sized on one GPU is enough on another if both plan for the same number
 * of multiprocessors and have the same compute capability, which determines the tiles. */
int sharp_cuda_device(SharpDevice* device);

/* Enqueue a fill of device memory with zeros on the stream. */
int sharp_cuda_zero(void* to, size_t bytes, SharpStream stream);

/* Enqueue a copy between device buffers on the stream, for caches that are not updated in place. */
int sharp_cuda_copy(void* to, const void* from, size_t bytes, SharpStream stream);

/* Return why this thread's last failed call failed, in one sentence; valid until the thread's next failed call. */
const char* sharp_cuda_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
