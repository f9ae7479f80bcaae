// The functions of sampling in sharp_cuda.h.
#include "plan.h"

using namespace sharp::cuda;

namespace {
constexpr const char* kKernel = "sample_rows";
}  // namespace

SHARP_EXPORT int sharp_cuda_prepare_sampling(void) {
  return status_of([&] { load_kernel(kKernel); });
}

SHARP_EXPORT int sharp_cuda_sample(const SharpSampling* sampling, SharpStream stream) {
  return status_of([&] {
    require(sampling->rows >= 0 && sampling->vocab > 0, "rows must be 0 or more and vocab positive");
    Arguments arguments;
    arguments.set(Argument::logits, sampling->logits);
    arguments.set(Argument::indices, sampling->indices);
    arguments.set(Argument::samplings, sampling->samplings);
    arguments.set(Argument::starts, sampling->starts);
    arguments.set(Argument::changes, sampling->changes);
    arguments.set(Argument::candidates, sampling->candidates);
    arguments.set(Argument::sampled, sampling->sampled);
    arguments.set(Argument::vocab, sampling->vocab);
    launch_kernel(kKernel, {sampling->rows}, arguments, stream);
  });
}
