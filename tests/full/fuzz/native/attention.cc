// SharpAttention: any call is refused in one sentence, or runs within its tensors.
#include <algorithm>

#include "attention_op.h"
#include "decoding.h"

namespace sharp::fuzz {
namespace {

using Input = Contiguous::Input;

std::vector<int32_t> lengths(Decoder& decoder, int64_t batch, int64_t most) {
  std::vector<int32_t> made;
  for (int64_t sequence = 0; sequence < batch; ++sequence)
    made.push_back(decoder.one_in(16) ? decoder.any_int()
                                      : static_cast<int32_t>(decoder.number(0, std::max<int64_t>(most, 0))));
  return made;
}

void decode(Decoder& decoder, const OrtCustomOp& op, Call& call) {
  static const int64_t head_dims[] = {4, 1, 2, 8, 15, 16, 32, 33, 64, 100};
  call.attributes = decoder.attributes();
  const int64_t batch = decoder.number(decoder.one_in(16) ? 0 : 1, 3), kv_heads = decoder.number(1, 3);
  const int64_t q_heads = kv_heads * decoder.number(1, 9);
  const int64_t head_dim = decoder.one_of(head_dims), value_dim = decoder.one_of(head_dims);
  const int64_t work = decoder.one_in(8) ? kWork : kLittleWork;
  const int64_t pairs = std::max<int64_t>(work / (q_heads * (head_dim + value_dim) * std::max<int64_t>(batch, 1)), 1);
  const int64_t queries = std::min(decoder.number(0, decoder.one_in(4) ? 70 : 4), pairs);
  const int64_t keys = std::min(pairs / std::max<int64_t>(queries, 1), int64_t{3000});
  const int64_t new_keys = decoder.one_in(4) ? decoder.number(0, std::min<int64_t>(keys, 80)) : queries;
  const int64_t capacity = decoder.number(0, decoder.one_in(2) ? keys : std::min<int64_t>(keys, 80));

  const Type compute = op.GetInputType(&op, Input::kQuery), cache = op.GetInputType(&op, Input::kPastKey);
  call.inputs.resize(Input::kInputCount);
  const auto set = [&](Input input, std::unique_ptr<Tensor> tensor) { call.inputs[input] = std::move(tensor); };
  set(Input::kQuery, filled(decoder, compute, {batch, q_heads, queries, head_dim}));
  set(Input::kKey, filled(decoder, compute, {batch, kv_heads, new_keys, head_dim}));
  set(Input::kValue, filled(decoder, compute, {batch, kv_heads, new_keys, value_dim}));
  bool shared = false;
  if (compute != cache) {
    if (decoder.one_in(2)) set(Input::kPastKey, filled(decoder, cache, {0}));
    if (decoder.one_in(2)) set(Input::kPastValue, filled(decoder, cache, {0}));
  } else if (!decoder.one_in(4)) {
    set(Input::kPastKey, filled(decoder, cache, {batch, kv_heads, capacity, head_dim}));
    set(Input::kPastValue, filled(decoder, cache, {batch, kv_heads, capacity, value_dim}));
    shared = decoder.one_in(2);
    if (shared) set(Input::kPastLens, ints(lengths(decoder, batch, capacity - new_keys), {batch}));
  }
  if (decoder.one_in(4)) set(Input::kTotalLens, ints(lengths(decoder, batch, capacity + new_keys), {batch}));
  if (call.attributes.count("normalizer") > 0) set(Input::kHeadParams, head_params(decoder, call, q_heads));
  if (decoder.one_in(3)) set(Input::kAlibiSlopes, filled(decoder, kFloat, {q_heads}));
  if (decoder.one_in(3)) set(Input::kCollectStats, boolean(decoder.one_in(2)));
  if (decoder.one_in(3))
    for (int64_t left = decoder.number(1, 3); left > 0; --left) decoder.damage(op, call);

  call.has_output.assign(Contiguous::kOutputCount, true);
  for (size_t output = Contiguous::kPresentKey; output < Contiguous::kOutputCount; ++output)
    call.has_output[output] = !decoder.one_in(8);
  call.in_place.assign(Contiguous::kOutputCount, -1);
  if (decoder.one_in(2)) {
    call.in_place[Contiguous::kPresentKey] = Input::kPastKey;
    call.in_place[Contiguous::kPresentValue] = Input::kPastValue;
  }
  if (decoder.one_in(8)) call.inputs.resize(Input::kValue + 1);
  if (call.inputs.size() == Input::kValue + 1) std::fill(call.in_place.begin(), call.in_place.end(), -1);
}

}  // namespace
}  // namespace sharp::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sharp;
  fuzz::Decoder decoder(data, size);
  const OrtCustomOp& op = fuzz::op_named("SharpAttention", decoder);
  fuzz::Call call;
  fuzz::decode(decoder, op, call);
  fuzz::run(op, call);
  return 0;
}
