// Fuzzes the sampler: for any logits it samples an allowed token of the vocabulary, or none.
#include "sampling.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "decoding.h"

namespace {

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "FINDING: %s\n", what);
  std::abort();
}

// Makes an array of exactly its size, aligned to no more than its elements need.
template <typename T>
std::unique_ptr<T[]> array_of(int64_t count) {
  return std::unique_ptr<T[]>(new T[count]);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using sharp::fuzz::Decoder;
  using sharp::fuzz::Tensor;
  Decoder decoder(data, size);
  static const int64_t sizes[] = {1, 2, 16, 127, 128, 129, 255, 256, 1000, 5000};
  const int64_t tokens = decoder.one_in(2) ? decoder.one_of(sizes) : decoder.number(1, 400);
  const int64_t rows = decoder.number(0, 3);
  Tensor logits = Tensor::of(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {rows, tokens});
  decoder.fill(logits);
  const auto samplings = array_of<SharpSampling>(rows);
  for (int64_t row = 0; row < rows; ++row) {
    // The range that serving/api/sampling_params.py accepts: any temperature above 0 and up to 2, and top_k up to
    // 2^31 - 1.
    static const double sharpnesses[] = {1, 0, 0.5, 100, 1e6, 1e30, 1e300};
    static const double top_ks[] = {0, 1, 2, 40, 1e5, 2147483647};
    static const double fractions[] = {1, 0.9, 0.5, 1e-9, 1e-300, 0};
    static const double randoms[] = {0, 0.5, 0.999999999999999, 1 - 1.0 / (1ull << 53), 1e-300};
    samplings[row] = {decoder.one_of(sharpnesses), decoder.one_of(top_ks),
                      decoder.one_in(2) ? decoder.one_of(fractions) : 0.95,
                      decoder.one_in(2) ? 1 - decoder.one_of(fractions) : 0, decoder.one_of(randoms)};
  }
  const auto chosen = array_of<int64_t>(rows);
  if (sharp_sample(logits.as<float>(), rows, tokens, samplings.get(), chosen.get()) != nullptr) fail("an error");
  for (int64_t row = 0; row < rows; ++row)
    if (chosen[row] < -1 || chosen[row] >= tokens) fail("a token that is not in the vocabulary");

  const int64_t count = rows == 0 ? 0 : decoder.number(0, 3);
  const int64_t top = std::min(decoder.number(0, decoder.one_in(2) ? 20 : 400), tokens), width = 1 + top;
  const auto places = array_of<int64_t>(count), ids = array_of<int64_t>(count * width);
  const auto logprobs = array_of<double>(count * width);
  for (int64_t index = 0; index < count; ++index) {
    places[index] = decoder.number(0, rows - 1);
    ids[index * width] = decoder.number(0, tokens - 1);
  }
  if (sharp_logprobs(logits.as<float>(), tokens, places.get(), count, top, ids.get(), logprobs.get()) != nullptr)
    fail("an error");
  for (int64_t index = 0; index < count * width; ++index)
    if (ids[index] < 0 || ids[index] >= tokens) fail("a token that is not in the vocabulary");
  return 0;
}
