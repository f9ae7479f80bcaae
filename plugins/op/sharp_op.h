/* Generated from plugins/op/definition.py by `python -m sharp.plugins.op.generate`: do not edit.
 *
 * The ops in C: numbers of types and normalizers, a call of each op; and in C++ the tables that check.cc and the
 * adapters of the runtimes go through.
 */
#ifndef SHARP_OP_H
#define SHARP_OP_H

#include <stdint.h>

typedef enum { SHARP_FLOAT32, SHARP_FLOAT16, SHARP_BFLOAT16, SHARP_INT8, SHARP_FP8 } SharpType; /* FP8: e4m3 */

typedef enum {
  SHARP_SOFTMAX = 0,
  SHARP_SSA = 1,
  SHARP_ADAPTIVE_SOFTMAX = 2,
  SHARP_ENTMAX = 3,
  SHARP_SIGMOID = 4,
  SHARP_RELU = 5,
  SHARP_RELU2 = 6,
  SHARP_SOFTPICK = 7
} SharpNormalizer;

enum { SHARP_MAX_TEMPERATURE_TERMS = 8 };

/* Attributes that are one number: kernels may have arguments of these names. */
#define SHARP_ATTRIBUTE_ARGUMENTS(X) \
  X(scale) X(alpha) X(entropy_threshold) X(softcap) X(window) X(causal) X(key_bound) X(stats_columns)

typedef struct {
  SharpNormalizer normalizer;
  /* factor of query . key */
  float scale;
  /* of entmax */
  float alpha;
  /* of adaptive_softmax, highest power first; 1 to 8 numbers */
  float temperature_coefficients[8];
  /* numbers of temperature_coefficients */
  int32_t temperature_terms;
  /* of adaptive_softmax, in nats */
  float entropy_threshold;
  /* 0 = off */
  float softcap;
  /* -1 = off */
  int32_t window;
  /* 0: a query sees keys behind it too */
  int32_t causal;
  /* no key, stored or new, that a head with an ALiBi slope sees is longer (Euclidean); 0 = not known */
  float key_bound;
  /* columns of `stats`: 5 adds the sink's mass; `sharp-export` sets it where heads have sinks */
  int32_t stats_columns;
} SharpAttributes;

/* One call of PagedAttention. Sizes are known to the host; buffers lie where the kernels run. */
typedef struct {
  SharpAttributes attributes;
  int64_t tokens;
  int64_t q_heads;
  int64_t head_dim;
  int64_t kv_heads;
  int64_t value_dim;
  int64_t blocks;
  int64_t block_size;
  int64_t sequences;
  int64_t max_blocks;
  int64_t parameters;
  /* that the call is planned for; 0: those of the current device */
  int64_t multiprocessors;
  /* whether alibi_slopes is given, before buffers are */
  int32_t alibi;
  /* whether key_screen is given, before buffers are */
  int32_t screened;
  /* T */
  SharpType type;
  /* C */
  SharpType cache_type;
  /* type [tokens, q_heads, head_dim], tokens of all sequences packed, positions applied; kv_heads divides q_heads */
  const void* query;
  /* type [tokens, kv_heads, head_dim] */
  const void* key;
  /* type [tokens, kv_heads, value_dim] */
  const void* value;
  /* cache_type [blocks, kv_heads, head_dim, block_size], dimension-major inside a block */
  void* key_cache;
  /* cache_type [blocks, kv_heads, block_size, value_dim] */
  void* value_cache;
  /* [tokens], block * block_size + offset, -1 = do not store */
  const int32_t* slot_mapping;
  /* [sequences, max_blocks], -1 = unused */
  const int32_t* block_table;
  /* [sequences + 1], cumulative number of tokens */
  const int32_t* query_start;
  /* [sequences], tokens in the cache before this step */
  const int32_t* context_lens;
  /* [q_heads, parameters], the normalizer's own columns (ssa: b, n; sigmoid: bias, power; relu, relu2: power;
   * others none); one more column, the last, is the head's sink: a logit that competes with those of the keys and
   * has no value, -infinity for none; or null */
  const float* head_params;
  /* [q_heads], the bias of key j for position p is -slope * |j - p|; or null */
  const float* alibi_slopes;
  /* scalar, absent or false: `stats` is zeros and is not computed; or null */
  const uint8_t* collect_stats;
  /* [blocks, kv_heads], for int8 and fp8 caches: a key is scale * number; or null */
  float* key_scale;
  /* [blocks, kv_heads], for int8 and fp8 caches: a value is scale * number; or null */
  float* value_scale;
  /* [blocks, kv_heads, screen_bytes], for entmax over a cache of floats: the keys in 8 bits, from which kernels
   * know which keys surely have weight 0; screen_bytes = block_size * (head_dim rounded up to a multiple of 4,
   * plus 8); a block of zeros has no screen, and 0 blocks mean no screen at all; or null */
  int8_t* key_screen;
  /* [kv_heads, head_dim], the vector that is subtracted from a head's keys before key_screen stores them; or null */
  const float* key_shift;
  /* type [tokens, q_heads, value_dim] */
  void* output;
  /* [tokens, q_heads, stats_columns], entropy (nats), support, inverse temperature, logit spread; a fifth column
   * is the sink's share of the sum that divides a row's weights */
  float* stats;
} SharpPagedAttention;

/* One call of SharpAttention. Sizes are known to the host; buffers lie where the kernels run. */
typedef struct {
  SharpAttributes attributes;
  int64_t batch;
  int64_t q_heads;
  int64_t queries;
  int64_t head_dim;
  int64_t kv_heads;
  int64_t new_keys;
  int64_t value_dim;
  int64_t capacity;
  int64_t parameters;
  /* that the call is planned for; 0: those of the current device */
  int64_t multiprocessors;
  /* whether past_key is given, before buffers are */
  int32_t has_past;
  /* whether past_lens is given, before buffers are */
  int32_t shared;
  /* whether alibi_slopes is given, before buffers are */
  int32_t alibi;
  /* whether present_key is given, before buffers are */
  int32_t has_presents;
  /* T */
  SharpType type;
  /* type [batch, q_heads, queries, head_dim], positions applied */
  const void* query;
  /* type [batch, kv_heads, new_keys, head_dim], kv_heads divides q_heads */
  const void* key;
  /* type [batch, kv_heads, new_keys, value_dim] */
  const void* value;
  /* cache_type [batch, kv_heads, capacity, head_dim], capacity is the number of past keys, or of the places of a
   * shared buffer; or null */
  const void* past_key;
  /* cache_type [batch, kv_heads, capacity, value_dim], with past_key; or null */
  const void* past_value;
  /* [batch], filled places of a shared buffer; or null */
  const int32_t* past_lens;
  /* [batch], keys that are not padding, past included; or null */
  const int32_t* total_lens;
  /* [q_heads, parameters], the normalizer's own columns (ssa: b, n; sigmoid: bias, power; relu, relu2: power;
   * others none); one more column, the last, is the head's sink: a logit that competes with those of the keys and
   * has no value, -infinity for none; or null */
  const float* head_params;
  /* [q_heads], the bias of key j for position p is -slope * |j - p|; or null */
  const float* alibi_slopes;
  /* scalar, absent or false: `stats` is zeros and is not computed; or null */
  const uint8_t* collect_stats;
  /* type [batch, q_heads, queries, value_dim] */
  void* output;
  /* cache_type [batch, kv_heads, slots, head_dim], slots is past + new_keys, or capacity; or null */
  void* present_key;
  /* cache_type [batch, kv_heads, slots, value_dim]; or null */
  void* present_value;
  /* [batch, q_heads, queries, stats_columns], entropy (nats), support, inverse temperature, logit spread; a fifth
   * column is the sink's share of the sum that divides a row's weights; or null */
  float* stats;
} SharpAttention;

#ifdef __cplusplus
#include <cstddef>
#include <limits>

namespace sharp {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

struct NormalizerDefinition {
  const char* name;
  int64_t columns;  // of head_params, its own
  const char* column_names[2];
  bool positive;   // its columns are above 0
  bool competes;   // weights are divided by their sum: there may be a sink, and own columns are needed
  bool sparse;     // a visible key can have the weight 0
  int64_t passes;  // sets of sums; more than 1: a weight is known only after a pass over all logits
};
constexpr NormalizerDefinition kNormalizers[] = {
    {"softmax", 0, {}, false, true, false, 1},
    {"ssa", 2, {"b", "n"}, true, true, false, 1},
    {"adaptive_softmax", 0, {}, false, true, false, 2},
    {"entmax", 0, {}, false, true, true, 3},
    {"sigmoid", 2, {"bias", "power"}, false, false, false, 1},
    {"relu", 1, {"power"}, false, false, true, 1},
    {"relu2", 1, {"power"}, false, false, true, 1},
    {"softpick", 0, {}, false, true, true, 1},
};

enum class AttributeType { kFloat, kInt, kString, kFloats };
struct AttributeDefinition {
  const char* name;
  AttributeType type;
  size_t offset;    // in SharpAttributes
  double fallback;  // NaN: every node has it
};
constexpr AttributeDefinition kAttributes[] = {
    {"normalizer", AttributeType::kString, offsetof(SharpAttributes, normalizer),
     std::numeric_limits<double>::quiet_NaN()},
    {"scale", AttributeType::kFloat, offsetof(SharpAttributes, scale), std::numeric_limits<double>::quiet_NaN()},
    {"alpha", AttributeType::kFloat, offsetof(SharpAttributes, alpha), 1.5},
    {"temperature_coefficients", AttributeType::kFloats, offsetof(SharpAttributes, temperature_coefficients),
     std::numeric_limits<double>::quiet_NaN()},
    {"entropy_threshold", AttributeType::kFloat, offsetof(SharpAttributes, entropy_threshold), 0.5},
    {"softcap", AttributeType::kFloat, offsetof(SharpAttributes, softcap), 0},
    {"window", AttributeType::kInt, offsetof(SharpAttributes, window), -1},
    {"causal", AttributeType::kInt, offsetof(SharpAttributes, causal), 1},
    {"key_bound", AttributeType::kFloat, offsetof(SharpAttributes, key_bound), 0},
    {"stats_columns", AttributeType::kInt, offsetof(SharpAttributes, stats_columns), 4},
};
constexpr float kDefaultCoefficients[] = {-0.037f, 0.481f, -2.3f, 4.917f, -1.791f};

// What an attribute must be; the offset is that of kAttributes.
struct LimitsDefinition {
  int attribute;   // in kAttributes
  int normalizer;  // whose calls are checked; -1: all
  bool gpu;        // only calls on a GPU are checked
  double least, most;
  bool open, infinite;  // without `least`; with infinity
  const char* rule;
};
constexpr LimitsDefinition kLimits[] = {
    {1, -1, false, 0, kInfinite, true, false, "a positive, finite number"},
    {2, SHARP_ENTMAX, false, 1, kInfinite, true, false, "a finite number above 1 for entmax"},
    {2, SHARP_ENTMAX, true, -kInfinite, 4, false, false, "at most 4 for entmax on a GPU"},
    {5, -1, false, 0, kInfinite, false, false, "0 (off) or a positive, finite number"},
    {6, -1, false, -1, kInfinite, false, false, "-1 (off), 0 or more"},
    {8, -1, false, 0, kInfinite, false, true, "0 (not known) or positive"},
    {9, -1, false, 4, 5, false, false, "4, or 5 with the sink's mass"},
};

constexpr const char* kTypeNames[] = {"float32", "float16", "bfloat16", "int8", "fp8"};

enum class TensorType { kT, kC, kFloat, kInt32, kInt8, kBool };

// A dimension: a size of the call and a number; size -1: screen_bytes.
struct Dimension {
  int size, plus;
};
struct ParameterDefinition {
  const char* name;
  TensorType type;
  int rank;  // -1: any
  Dimension dimensions[4];
  const char* shape;
  bool optional;
  size_t buffer;  // of the struct of a call
  int64_t flag;   // of the struct, -1: none
};
struct OutputDefinition {
  const char* name;
  TensorType type;
  bool optional;
  int in_place;  // the input whose memory it may take, -1: none
};

struct Paged {
  using Call = SharpPagedAttention;
  static constexpr const char* kName = "PagedAttention";
  enum Input {
    kQuery,
    kKey,
    kValue,
    kKeyCache,
    kValueCache,
    kSlotMapping,
    kBlockTable,
    kQueryStart,
    kContextLens,
    kHeadParams,
    kAlibiSlopes,
    kCollectStats,
    kKeyScale,
    kValueScale,
    kKeyScreen,
    kKeyShift,
    kInputCount
  };
  enum Output {
    kOutput,
    kKeyCacheOut,
    kValueCacheOut,
    kStats,
    kKeyScaleOut,
    kValueScaleOut,
    kKeyScreenOut,
    kOutputCount
  };
  static constexpr size_t kSizes[] = {
      offsetof(SharpPagedAttention, tokens),     offsetof(SharpPagedAttention, q_heads),
      offsetof(SharpPagedAttention, head_dim),   offsetof(SharpPagedAttention, kv_heads),
      offsetof(SharpPagedAttention, value_dim),  offsetof(SharpPagedAttention, blocks),
      offsetof(SharpPagedAttention, block_size), offsetof(SharpPagedAttention, sequences),
      offsetof(SharpPagedAttention, max_blocks), offsetof(SharpPagedAttention, parameters)};
  static constexpr const char* kSizeNames[] = {"tokens", "q_heads",    "head_dim",  "kv_heads",   "value_dim",
                                               "blocks", "block_size", "sequences", "max_blocks", "parameters"};
  static constexpr ParameterDefinition kInputs[] = {
      {"query",
       TensorType::kT,
       3,
       {{0, 0}, {1, 0}, {2, 0}},
       "[tokens, q_heads, head_dim]",
       false,
       offsetof(SharpPagedAttention, query),
       -1},
      {"key",
       TensorType::kT,
       3,
       {{0, 0}, {3, 0}, {2, 0}},
       "[tokens, kv_heads, head_dim]",
       false,
       offsetof(SharpPagedAttention, key),
       -1},
      {"value",
       TensorType::kT,
       3,
       {{0, 0}, {3, 0}, {4, 0}},
       "[tokens, kv_heads, value_dim]",
       false,
       offsetof(SharpPagedAttention, value),
       -1},
      {"key_cache",
       TensorType::kC,
       4,
       {{5, 0}, {3, 0}, {2, 0}, {6, 0}},
       "[blocks, kv_heads, head_dim, block_size]",
       false,
       offsetof(SharpPagedAttention, key_cache),
       -1},
      {"value_cache",
       TensorType::kC,
       4,
       {{5, 0}, {3, 0}, {6, 0}, {4, 0}},
       "[blocks, kv_heads, block_size, value_dim]",
       false,
       offsetof(SharpPagedAttention, value_cache),
       -1},
      {"slot_mapping",
       TensorType::kInt32,
       1,
       {{0, 0}},
       "[tokens]",
       false,
       offsetof(SharpPagedAttention, slot_mapping),
       -1},
      {"block_table",
       TensorType::kInt32,
       2,
       {{7, 0}, {8, 0}},
       "[sequences, max_blocks]",
       false,
       offsetof(SharpPagedAttention, block_table),
       -1},
      {"query_start",
       TensorType::kInt32,
       1,
       {{7, 1}},
       "[sequences + 1]",
       false,
       offsetof(SharpPagedAttention, query_start),
       -1},
      {"context_lens",
       TensorType::kInt32,
       1,
       {{7, 0}},
       "[sequences]",
       false,
       offsetof(SharpPagedAttention, context_lens),
       -1},
      {"head_params",
       TensorType::kFloat,
       2,
       {{1, 0}, {9, 0}},
       "[q_heads, parameters]",
       true,
       offsetof(SharpPagedAttention, head_params),
       -1},
      {"alibi_slopes",
       TensorType::kFloat,
       1,
       {{1, 0}},
       "[q_heads]",
       true,
       offsetof(SharpPagedAttention, alibi_slopes),
       static_cast<int64_t>(offsetof(SharpPagedAttention, alibi))},
      {"collect_stats", TensorType::kBool, -1, {}, "scalar", true, offsetof(SharpPagedAttention, collect_stats), -1},
      {"key_scale",
       TensorType::kFloat,
       2,
       {{5, 0}, {3, 0}},
       "[blocks, kv_heads]",
       true,
       offsetof(SharpPagedAttention, key_scale),
       -1},
      {"value_scale",
       TensorType::kFloat,
       2,
       {{5, 0}, {3, 0}},
       "[blocks, kv_heads]",
       true,
       offsetof(SharpPagedAttention, value_scale),
       -1},
      {"key_screen",
       TensorType::kInt8,
       3,
       {{5, 0}, {3, 0}, {-1, 0}},
       "[blocks, kv_heads, screen_bytes]",
       true,
       offsetof(SharpPagedAttention, key_screen),
       static_cast<int64_t>(offsetof(SharpPagedAttention, screened))},
      {"key_shift",
       TensorType::kFloat,
       2,
       {{3, 0}, {2, 0}},
       "[kv_heads, head_dim]",
       true,
       offsetof(SharpPagedAttention, key_shift),
       -1},
  };
  static constexpr OutputDefinition kOutputs[] = {
      {"output", TensorType::kT, false, -1},
      {"key_cache_out", TensorType::kC, false, kKeyCache},
      {"value_cache_out", TensorType::kC, false, kValueCache},
      {"stats", TensorType::kFloat, false, -1},
      {"key_scale_out", TensorType::kFloat, true, kKeyScale},
      {"value_scale_out", TensorType::kFloat, true, kValueScale},
      {"key_screen_out", TensorType::kInt8, true, kKeyScreen},
  };
};

struct Contiguous {
  using Call = SharpAttention;
  static constexpr const char* kName = "SharpAttention";
  enum Input {
    kQuery,
    kKey,
    kValue,
    kPastKey,
    kPastValue,
    kPastLens,
    kTotalLens,
    kHeadParams,
    kAlibiSlopes,
    kCollectStats,
    kInputCount
  };
  enum Output { kOutput, kPresentKey, kPresentValue, kStats, kOutputCount };
  static constexpr size_t kSizes[] = {
      offsetof(SharpAttention, batch),     offsetof(SharpAttention, q_heads),  offsetof(SharpAttention, queries),
      offsetof(SharpAttention, head_dim),  offsetof(SharpAttention, kv_heads), offsetof(SharpAttention, new_keys),
      offsetof(SharpAttention, value_dim), offsetof(SharpAttention, capacity), offsetof(SharpAttention, parameters)};
  static constexpr const char* kSizeNames[] = {"batch",    "q_heads",   "queries",  "head_dim",  "kv_heads",
                                               "new_keys", "value_dim", "capacity", "parameters"};
  static constexpr ParameterDefinition kInputs[] = {
      {"query",
       TensorType::kT,
       4,
       {{0, 0}, {1, 0}, {2, 0}, {3, 0}},
       "[batch, q_heads, queries, head_dim]",
       false,
       offsetof(SharpAttention, query),
       -1},
      {"key",
       TensorType::kT,
       4,
       {{0, 0}, {4, 0}, {5, 0}, {3, 0}},
       "[batch, kv_heads, new_keys, head_dim]",
       false,
       offsetof(SharpAttention, key),
       -1},
      {"value",
       TensorType::kT,
       4,
       {{0, 0}, {4, 0}, {5, 0}, {6, 0}},
       "[batch, kv_heads, new_keys, value_dim]",
       false,
       offsetof(SharpAttention, value),
       -1},
      {"past_key",
       TensorType::kC,
       4,
       {{0, 0}, {4, 0}, {7, 0}, {3, 0}},
       "[batch, kv_heads, capacity, head_dim]",
       true,
       offsetof(SharpAttention, past_key),
       static_cast<int64_t>(offsetof(SharpAttention, has_past))},
      {"past_value",
       TensorType::kC,
       4,
       {{0, 0}, {4, 0}, {7, 0}, {6, 0}},
       "[batch, kv_heads, capacity, value_dim]",
       true,
       offsetof(SharpAttention, past_value),
       -1},
      {"past_lens",
       TensorType::kInt32,
       1,
       {{0, 0}},
       "[batch]",
       true,
       offsetof(SharpAttention, past_lens),
       static_cast<int64_t>(offsetof(SharpAttention, shared))},
      {"total_lens", TensorType::kInt32, 1, {{0, 0}}, "[batch]", true, offsetof(SharpAttention, total_lens), -1},
      {"head_params",
       TensorType::kFloat,
       2,
       {{1, 0}, {8, 0}},
       "[q_heads, parameters]",
       true,
       offsetof(SharpAttention, head_params),
       -1},
      {"alibi_slopes",
       TensorType::kFloat,
       1,
       {{1, 0}},
       "[q_heads]",
       true,
       offsetof(SharpAttention, alibi_slopes),
       static_cast<int64_t>(offsetof(SharpAttention, alibi))},
      {"collect_stats", TensorType::kBool, -1, {}, "scalar", true, offsetof(SharpAttention, collect_stats), -1},
  };
  static constexpr OutputDefinition kOutputs[] = {
      {"output", TensorType::kT, false, -1},
      {"present_key", TensorType::kC, true, kPastKey},
      {"present_value", TensorType::kC, true, kPastValue},
      {"stats", TensorType::kFloat, true, -1},
  };
};

}  // namespace sharp
#endif

#endif
