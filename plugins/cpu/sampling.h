// The C functions of the sampler; `sharp.plugins.sampling` describes them to Python.
#pragma once

#include <cstdint>

extern "C" {

struct SharpSampling {
  double sharpness;  // 1 / temperature; 0 takes the most likely token
  double top_k, top_p, min_p;
  double random;  // from 0 to below 1
};

// Draws a token per row of logits [rows, tokens]; -1 where the highest logit is not finite. Returns an error or null.
__attribute__((visibility("default"))) const char* sharp_sample(const float* logits, int64_t rows, int64_t tokens,
                                                                const SharpSampling* samplings, int64_t* chosen);

// For `count` rows of logits the log probabilities of a token each and of the `top` most likely ones, best first: token
// ids [count, 1 + top], of which the first is given, and logprobs [count, 1 + top]. Returns an error or null.
__attribute__((visibility("default"))) const char* sharp_logprobs(const float* logits, int64_t tokens,
                                                                  const int64_t* rows, int64_t count, int64_t top,
                                                                  int64_t* token_ids, double* logprobs);
}
