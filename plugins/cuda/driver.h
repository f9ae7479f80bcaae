// The CUDA driver, loaded at run time, so that the library also loads on machines without a driver.
#pragma once

#include <cuda.h>

#include <stdexcept>
#include <string>

namespace sharp::cuda {

// An error of the driver or the library, in one sentence.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The driver's functions that are used here, under their own names.
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

// Returns the driver. Throws Error if there is none, or if it is older than CUDA 12.
const Driver& driver();

// Throws Error with the driver's message unless `result` is success.
void check(CUresult result, const char* what);

}  // namespace sharp::cuda
