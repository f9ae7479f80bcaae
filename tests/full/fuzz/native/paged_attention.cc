// PagedAttention: any call is refused in one sentence, or runs within its tensors and leaves other blocks as they are.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "decoding.h"
#include "paged_attention_op.h"

namespace sharp::fuzz {
namespace {

void decode(Decoder& decoder, const OrtCustomOp& op, Call& call) {
  static const int64_t head_dims[] = {4, 1, 2, 8, 15, 16, 32, 33, 64, 100};
  static const int64_t block_sizes[] = {16, 16, 32, 64, 1, 5, 128};
  call.attributes = decoder.attributes();
  const int64_t kv_heads = decoder.number(1, 3), group = decoder.number(1, 9), q_heads = kv_heads * group;
  const int64_t head_dim = decoder.one_of(head_dims), value_dim = decoder.one_of(head_dims);
  const int64_t block_size = decoder.one_of(block_sizes), block = kv_heads * (head_dim + value_dim) * block_size;
  const int64_t most_blocks = std::clamp<int64_t>(4096 / block, 1, 8);
  const int64_t blocks = decoder.number(decoder.one_in(16) ? 0 : 1, most_blocks);
  const int64_t sequences = decoder.number(decoder.one_in(16) ? 0 : 1, 4);
  std::vector<int32_t> starts = {0}, contexts;
  int64_t longest = 0;
  int64_t work = decoder.one_in(8) ? kWork : kLittleWork;
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    const int64_t most = std::max<int64_t>(work / (q_heads * (head_dim + value_dim)), 1);
    const int64_t queries = std::min(decoder.number(0, decoder.one_in(4) ? 70 : 4), most);
    const int64_t keys = std::min(most / std::max<int64_t>(queries, 1), int64_t{5000});
    const int64_t context = decoder.number(0, decoder.one_in(2) ? keys : std::min<int64_t>(keys, 80));
    work -= queries * (context + queries) * q_heads * (head_dim + value_dim);
    starts.push_back(static_cast<int32_t>(starts.back() + queries));
    contexts.push_back(static_cast<int32_t>(context));
    longest = std::max(longest, context + queries);
  }
  const int64_t tokens = starts.back();
  const int64_t max_blocks = (longest + block_size - 1) / block_size + decoder.number(0, 1);
  std::vector<int32_t> table(sequences * max_blocks), slots;
  const int64_t holes = decoder.number(0, 2);
  for (int32_t& block : table)
    block = blocks == 0 || (holes > 0 && decoder.random() % (4 * holes) == 0)
                ? -1
                : static_cast<int32_t>(decoder.random() % blocks);
  const bool any_slots = decoder.one_in(4);
  for (int64_t sequence = 0; sequence < sequences; ++sequence)
    for (int64_t query = 0; query < starts[sequence + 1] - starts[sequence]; ++query) {
      const int64_t position = contexts[sequence] + query;
      const int64_t block = any_slots ? int64_t{decoder.random() % (blocks + 1)} - 1
                                      : table[sequence * max_blocks + position / block_size];
      slots.push_back(block < 0 ? -1 : static_cast<int32_t>(block * block_size + position % block_size));
    }

  const Type compute = op.GetInputType(&op, Paged::kQuery), cache = op.GetInputType(&op, Paged::kKeyCache);
  const bool scaled = cache == ort::kInt8 || cache == ort::kFloat8;
  call.inputs.resize(Paged::kInputCount);
  const auto set = [&](Paged::Input input, std::unique_ptr<Tensor> tensor) { call.inputs[input] = std::move(tensor); };
  set(Paged::kQuery, filled(decoder, compute, {tokens, q_heads, head_dim}));
  set(Paged::kKey, filled(decoder, compute, {tokens, kv_heads, head_dim}));
  set(Paged::kValue, filled(decoder, compute, {tokens, kv_heads, value_dim}));
  set(Paged::kKeyCache, filled(decoder, cache, {blocks, kv_heads, head_dim, block_size}));
  set(Paged::kValueCache, filled(decoder, cache, {blocks, kv_heads, block_size, value_dim}));
  set(Paged::kSlotMapping, ints(slots, {tokens}));
  set(Paged::kBlockTable, ints(table, {sequences, max_blocks}));
  set(Paged::kQueryStart, ints(starts, {sequences + 1}));
  set(Paged::kContextLens, ints(contexts, {sequences}));
  if (call.attributes.count("normalizer") > 0) set(Paged::kHeadParams, head_params(decoder, call, q_heads));
  if (decoder.one_in(3)) set(Paged::kAlibiSlopes, filled(decoder, kFloat, {q_heads}));
  if (decoder.one_in(3)) set(Paged::kCollectStats, boolean(decoder.one_in(2)));
  if (scaled) {
    set(Paged::kKeyScale, filled(decoder, kFloat, {blocks, kv_heads}));
    set(Paged::kValueScale, filled(decoder, kFloat, {blocks, kv_heads}));
  } else if (decoder.one_in(3)) {
    const int64_t screen = (4 * ((head_dim + 3) / 4) + 8) * block_size;
    set(Paged::kKeyScreen, filled(decoder, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, {blocks, kv_heads, screen}));
    if (decoder.one_in(2)) std::fill_n(call.inputs[Paged::kKeyScreen]->data, call.inputs[Paged::kKeyScreen]->bytes(), 0);
    if (decoder.one_in(2)) set(Paged::kKeyShift, filled(decoder, kFloat, {kv_heads, head_dim}));
  }
  if (decoder.one_in(3))
    for (int64_t left = decoder.number(1, 3); left > 0; --left) decoder.damage(op, call);

  call.has_output.assign(Paged::kOutputCount, true);
  for (size_t output = Paged::kKeyScaleOut; output < Paged::kOutputCount; ++output)
    call.has_output[output] = !decoder.one_in(8);
  const bool in_place = decoder.one_in(2);
  call.in_place = {-1, Paged::kKeyCache, Paged::kValueCache, -1, Paged::kKeyScale, Paged::kValueScale, Paged::kKeyScreen};
  if (!in_place) std::fill(call.in_place.begin(), call.in_place.end(), -1);
  if (decoder.one_in(8)) call.inputs.resize(Paged::kContextLens + 1);
}

// Returns the content of the blocks, so that blocks without a slot can be compared after the call.
std::vector<char> copy_of(const Tensor& tensor) { return {tensor.data, tensor.data + tensor.bytes()}; }

void compare(const Call& call, Paged::Input input, Paged::Output output, const std::vector<char>& before) {
  const Tensor& cache = *call.inputs[input];
  const Tensor& after = *call.output_of[output];
  const int64_t blocks = cache.shape[0], block_size = call.inputs[Paged::kKeyCache]->shape[3];
  const Tensor& slots = *call.inputs[Paged::kSlotMapping];
  std::vector<bool> written(blocks, false);
  for (int64_t token = 0; token < slots.elements(); ++token)
    if (slots.as<int32_t>()[token] >= 0) written[slots.as<int32_t>()[token] / block_size] = true;
  const int64_t bytes = blocks == 0 ? 0 : cache.bytes() / blocks;
  for (int64_t block = 0; block < blocks; ++block)
    if (!written[block] && std::memcmp(before.data() + block * bytes, after.data + block * bytes, bytes) != 0) {
      std::fprintf(stderr, "FINDING: a block without a slot has changed\n");
      std::abort();
    }
}

}  // namespace
}  // namespace sharp::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sharp;
  fuzz::Decoder decoder(data, size);
  const OrtCustomOp& op = fuzz::op_named("PagedAttention", decoder);
  fuzz::Call call;
  fuzz::decode(decoder, op, call);
  const std::vector<char> keys = fuzz::copy_of(*call.inputs[Paged::kKeyCache]);
  const std::vector<char> values = fuzz::copy_of(*call.inputs[Paged::kValueCache]);
  if (!fuzz::run(op, call)) return 0;
  fuzz::compare(call, Paged::kKeyCache, Paged::kKeyCacheOut, keys);
  fuzz::compare(call, Paged::kValueCache, Paged::kValueCacheOut, values);
  return 0;
}
