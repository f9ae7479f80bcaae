// The CUDA driver, found at run time: the library loads on machines without one and says so when it is used.
#pragma once

#include <cuda.h>

#include <stdexcept>
#include <string>

namespace sharp::cuda {

// What went wrong, in one sentence.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The functions of the driver that are used here, under their own names.
struct Driver {
  decltype(&::cuGetErrorString) cuGetErrorString;
  decltype(&::cuCtxGetDevice) cuCtxGetDevice;
  decltype(&::cuDeviceGetAttribute) cuDeviceGetAttribute;
  decltype(&::cuLibraryLoadData) cuLibraryLoadData;
  decltype(&::cuLibraryGetKernel) cuLibraryGetKernel;
  decltype(&::cuKernelGetFunction) cuKernelGetFunction;
  decltype(&::cuKernelSetAttribute) cuKernelSetAttribute;
  decltype(&::cuLaunchKernel) cuLaunchKernel;
  decltype(&::cuMemcpyDtoDAsync) cuMemcpyDtoDAsync;
  decltype(&::cuMemcpy2DAsync) cuMemcpy2DAsync;
  decltype(&::cuMemsetD8Async) cuMemsetD8Async;
};

// Throws Error where there is no driver, or one older than CUDA 12.
const Driver& driver();

// Throws Error with the driver's words unless `result` is success.
void check(CUresult result, const char* what);

}  // namespace sharp::cuda
