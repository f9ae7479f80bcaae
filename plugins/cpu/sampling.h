// The C functions of the sampler; `sharp.plugins.sampling` describes them to Python.
#pragma once

#include <cstdint>

extern "C" {

struct SharpSampling {
  float sharpness;  // 1 / temperature; 0 takes the most likely token
  float min_p;
  double top_p;
  int64_t top_k;
  double random;  // from 0 to below 1
};

// Draws a token per row of logits [rows, tokens]; -1 where the highest logit is not finite. Returns an error or null.
__attribute__((visibility("default"))) const char* sharp_sample(const float* logits, int64_t rows, int64_t tokens,
                                                                const SharpSampling* samplings, int64_t* chosen);

// The `top` most likely tokens [count, top] of `count` rows of logits, best first, and their ln sum e^logit [count].
// Returns an error or null.
__attribute__((visibility("default"))) const char* sharp_most_likely(const float* logits, int64_t tokens,
                                                                     const int64_t* rows, int64_t count, int64_t top,
                                                                     int64_t* found, double* normalizers);
}
