#include "driver.h"

#include <dlfcn.h>

namespace sharp::cuda {
namespace {

// cuda.h renames some functions to their newest version (cuMemcpyDtoDAsync to ..._v2, but not cuMemsetD8Async), so the
// name to look up is the one that the linker would see.
#define SHARP_NAME(symbol) #symbol
#define SHARP_LOOK_UP(table, library, symbol) look_up(table.symbol, library, SHARP_NAME(symbol))

template <typename Function>
void look_up(Function& function, void* library, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr)
    throw Error(std::string("the CUDA driver has no ") + name +
                "; Sharp's kernels need the driver of CUDA 12 or newer");
}

Driver load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) throw Error(std::string("the CUDA driver could not be loaded: ") + dlerror());
  Driver table;
  SHARP_LOOK_UP(table, library, cuGetErrorString);
  SHARP_LOOK_UP(table, library, cuCtxGetDevice);
  SHARP_LOOK_UP(table, library, cuDeviceGetAttribute);
  SHARP_LOOK_UP(table, library, cuLibraryLoadData);
  SHARP_LOOK_UP(table, library, cuLibraryGetKernel);
  SHARP_LOOK_UP(table, library, cuKernelGetFunction);
  SHARP_LOOK_UP(table, library, cuKernelSetAttribute);
  SHARP_LOOK_UP(table, library, cuLaunchKernel);
  SHARP_LOOK_UP(table, library, cuMemcpyDtoDAsync);
  SHARP_LOOK_UP(table, library, cuMemcpy2DAsync);
  SHARP_LOOK_UP(table, library, cuMemsetD8Async);
  return table;
}

}  // namespace

const Driver& driver() {
  static const Driver table = load();  // after a failure the next use tries again and throws again
  return table;
}

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* words = nullptr;
  if (driver().cuGetErrorString(result, &words) != CUDA_SUCCESS || words == nullptr) words = "unknown error";
  throw Error(std::string(what) + " failed: " + words + " (CUDA error " + std::to_string(result) + ")");
}

}  // namespace sharp::cuda
