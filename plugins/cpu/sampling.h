// The C functions of the sampler, which `sharp.plugins.cpu.sampling` documents and calls.
#pragma once

#include <cstdint>

extern "C" {

struct SharpSampling {
  double sharpness;  // 1 / temperature; 0 takes the most likely token
  double top_k, top_p, min_p;
  double random;  // in [0, 1)
};

// Samples a token per row of logits [rows, tokens] into `chosen` [rows]; -1 if the highest logit is not finite or a
// logit is NaN. Returns an error or null.
__attribute__((visibility("default"))) const char* sharp_sample(const float* logits, int64_t rows, int64_t tokens,
                                                                const SharpSampling* samplings, int64_t* chosen);

// Computes natural log probabilities in `count` rows of logits, whose numbers are in `rows`: of one given token per row
// and of the `top` most likely tokens, best first. Token ids are [count, 1 + top]; the caller sets the first of each
// row, the given token. Logprobs are [count, 1 + top]. Returns an error or null.
__attribute__((visibility("default"))) const char* sharp_logprobs(const float* logits, int64_t tokens,
                                                                  const int64_t* rows, int64_t count, int64_t top,
                                                                  int64_t* token_ids, double* logprobs);
}
