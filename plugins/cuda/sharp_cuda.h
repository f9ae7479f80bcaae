/* libsharp_cuda.so: PagedAttention, Attention and sampling on NVIDIA GPUs, for whoever has a stream and device buffers.
 *
 * Nothing here synchronizes or allocates on the device, except that a kernel's code is loaded when it is first needed;
 * sharp_cuda_prepare does that beforehand, so that a stream may be captured into a CUDA graph. The caller's context
 * must be current. Every function that returns an int returns 0, or 1 with the reason in sharp_cuda_last_error().
 */
#ifndef SHARP_CUDA_H
#define SHARP_CUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st* SharpStream; /* a CUstream, which is a cudaStream_t */

typedef enum { SHARP_FLOAT32, SHARP_FLOAT16, SHARP_BFLOAT16, SHARP_INT8, SHARP_FP8 } SharpType; /* FP8: e4m3 */

typedef enum {
  SHARP_SOFTMAX,
  SHARP_SSA,
  SHARP_ADAPTIVE_SOFTMAX,
  SHARP_ENTMAX,
  SHARP_SIGMOID,
  SHARP_RELU,
  SHARP_RELU2,
  SHARP_SOFTPICK
} SharpNormalizer;

enum { SHARP_MAX_TEMPERATURE_TERMS = 8 };

typedef struct {
  SharpNormalizer normalizer;
  float scale;
  float alpha;                                                 /* entmax */
  float temperature_coefficients[SHARP_MAX_TEMPERATURE_TERMS]; /* adaptive softmax, highest power first */
  int32_t temperature_terms;
  float entropy_threshold; /* nats */
  float softcap;           /* 0 = off */
  int32_t window;          /* -1 = off */
  int32_t causal;
  int32_t stats_columns; /* 4, or 5 with the sink's mass */
} SharpAttributes;

/* A GPU as grids and scratch memory follow from it: 90 is compute capability 9.0. */
typedef struct {
  int32_t multiprocessors, compute_capability;
} SharpDevice;

/* One call of PagedAttention. Sizes are known to the host, everything else is device memory. */
typedef struct {
  SharpAttributes attributes;
  int64_t tokens, q_heads, kv_heads, head_dim, value_dim;
  int64_t blocks, block_size, sequences, max_blocks;
  int64_t multiprocessors; /* that the call is planned for; 0: those of the current device */
  SharpType type, cache_type;
  const void* query;           /* type [tokens, q_heads, head_dim] */
  const void* key;             /* type [tokens, kv_heads, head_dim] */
  const void* value;           /* type [tokens, kv_heads, value_dim] */
  void* key_cache;             /* cache_type [blocks, kv_heads, head_dim, block_size], updated in place */
  void* value_cache;           /* cache_type [blocks, kv_heads, block_size, value_dim], updated in place */
  float* key_scale;            /* [blocks, kv_heads], updated in place, or null: of int8 and fp8 caches */
  float* value_scale;          /* the same of values */
  void* key_screen;            /* int8 [blocks, kv_heads, block_size * (head_dim rounded up to 4, and 8)], updated in
                                  place, or null: of entmax, by which keys of weight 0 are left out */
  const float* key_shift;      /* [kv_heads, head_dim], what the screen has taken off the keys; or null */
  const int32_t* slot_mapping; /* [tokens] */
  const int32_t* block_table;  /* [sequences, max_blocks] */
  const int32_t* query_start;  /* [sequences + 1] */
  const int32_t* context_lens; /* [sequences] */
  const float* head_params;    /* [q_heads, head_params_width]: the normalizer's own, then the sinks; or null */
  int64_t head_params_width;
  int32_t alibi, screened;      /* whether there are slopes and a key screen; known before the buffers are */
  const float* alibi_slopes;    /* [q_heads], or null */
  const uint8_t* collect_stats; /* one bool, or null: false */
  void* output;                 /* type [tokens, q_heads, value_dim] */
  float* stats;                 /* [tokens, q_heads, stats_columns]; zeros where statistics are not collected */
} SharpPagedAttention;

/* One call of Attention, the op over contiguous keys. Keys of a sequence are those of the past, then the new ones.
 *
 * Without a past (`capacity` 0, no past_key) the keys are `key`. With past_lens the past is a buffer, and new keys that
 * count are written behind its filled slots; those that find no slot are left out. Else past and key are joined. */
typedef struct {
  SharpAttributes attributes;
  int64_t batch, q_heads, kv_heads, queries, new_keys, head_dim, value_dim;
  int64_t capacity;        /* slots of a sequence in the past */
  int64_t multiprocessors; /* that the call is planned for; 0: those of the current device */
  /* Known before the buffers are: whether there are past_key and past_value; past_lens; both presents. */
  int32_t has_past, shared, has_presents;
  SharpType type;
  const void* query;         /* type [batch, q_heads, queries, head_dim] */
  const void* key;           /* type [batch, kv_heads, new_keys, head_dim] */
  const void* value;         /* type [batch, kv_heads, new_keys, value_dim] */
  const void* past_key;      /* type [batch, kv_heads, capacity, head_dim], or null */
  const void* past_value;    /* type [batch, kv_heads, capacity, value_dim], or null */
  const int32_t* past_lens;  /* [batch], or null */
  const int32_t* total_lens; /* [batch], or null: all keys count */
  const float* head_params;  /* [q_heads, head_params_width]: the normalizer's own, then the sinks; or null */
  int64_t head_params_width;
  int32_t alibi;                /* whether there are slopes; known before the buffers are */
  const float* alibi_slopes;    /* [q_heads], or null */
  const uint8_t* collect_stats; /* one bool, or null: false */
  void* output;                 /* type [batch, q_heads, queries, value_dim] */
  void* present_key;            /* type [batch, kv_heads, capacity (+ new_keys), head_dim], past_key itself, or null */
  void* present_value;          /* type [batch, kv_heads, capacity (+ new_keys), value_dim], past_value or null */
  float* stats;                 /* [batch, q_heads, queries, stats_columns], or null; zeros where not collected */
} SharpAttention;

/* What is done to a logit before its row is sampled: + bias (-infinity masks it), / repetition where it is positive and
 * * repetition elsewhere, - amount. */
typedef struct {
  int32_t token;
  float bias, repetition, amount;
} SharpChange;

/* Tokens from logits, as plugins/sampling.py defines them; pointers are to memory that the device reads and writes. */
typedef struct {
  int64_t rows, vocab;
  float* logits;              /* [any, vocab], changed in place */
  const int64_t* indices;     /* [rows]: which of the logits; one that has changes is among them once */
  const double* samplings;    /* [rows, 5]: sharpness, top_k, top_p, min_p, random */
  const int32_t* starts;      /* [2 rows + 1]: where a row's first and second part of the changes begin */
  const SharpChange* changes; /* a part names a token once; other tokens than 0 to below vocab are left out */
  float* candidates;          /* [rows, SHARP_SAMPLING_CANDIDATES], scratch memory */
  int64_t* sampled;           /* [rows]; -1 where the highest logit is not finite */
} SharpSampling;

enum { SHARP_SAMPLING_CANDIDATES = 4096 };

/* Bytes of device memory that calls with these types and attributes and with sizes up to these need, aligned to 256.
 * Buffers may be null. */
int sharp_cuda_workspace_bytes(const SharpPagedAttention* problem, size_t* bytes);

/* Load the code of every kernel that such a call launches. */
int sharp_cuda_prepare(const SharpPagedAttention* problem);

/* Put the work on the stream. */
int sharp_cuda_paged_attention(const SharpPagedAttention* problem, void* workspace, SharpStream stream);

/* The same for Attention. */
int sharp_cuda_attention_workspace_bytes(const SharpAttention* problem, size_t* bytes);
int sharp_cuda_prepare_attention(const SharpAttention* problem);
int sharp_cuda_attention(const SharpAttention* problem, void* workspace, SharpStream stream);

/* Load the kernel that samples; put its work on the stream. */
int sharp_cuda_prepare_sampling(void);
int sharp_cuda_sample(const SharpSampling* sampling, SharpStream stream);

/* Add the kernels of a folder that `sharp build --backend cuda` or `make kernels` wrote to those that are built in, for
 * the rest of the process. Of one that is in both the built-in one is taken. */
int sharp_cuda_add_kernels(const char* folder);

/* Whether there is code of a kernel for a compute capability: 0 for yes. */
int sharp_cuda_find_kernel(const char* kernel, int32_t compute_capability);

/* The current device. Memory that was sized on one GPU is enough for calls on another if both plan for the same number
 * of multiprocessors and have the same compute capability, which the tiles follow from. */
int sharp_cuda_device(SharpDevice* device);

/* Zeros into device memory on the stream. */
int sharp_cuda_zero(void* to, size_t bytes, SharpStream stream);

/* Copy device memory to device memory on the stream; for caches that are not updated in place. */
int sharp_cuda_copy(void* to, const void* from, size_t bytes, SharpStream stream);

/* Why this thread's last call failed, in one sentence. */
const char* sharp_cuda_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
