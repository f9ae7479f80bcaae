// A CUDA driver without a GPU, which accepts every call and records it. A kernel image is text: the kernel's function
// and parameters ("scale x:ptr count:i32"), so that a launch's values can be recorded, then a zero and the kernel's
// name. The device's compute capability is in SHARP_FAKE_CAPABILITY.
//
// Launches compute nothing unless fake_compute has set a function that does their work. With such a function, and under
// SHARP_FAKE_HOST_MEMORY, device memory is host memory.
#include <cuda.h>

#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

namespace {

using Compute = void (*)(const char* image, unsigned x, unsigned y, unsigned z, void** parameters);

std::string events;
Compute compute = nullptr;

bool host_memory() { return compute != nullptr || std::getenv("SHARP_FAKE_HOST_MEMORY") != nullptr; }

void copy_rows(CUdeviceptr to, size_t to_pitch, CUdeviceptr from, size_t from_pitch, size_t bytes, size_t rows) {
  if (!host_memory()) return;
  for (size_t row = 0; row < rows; ++row)
    std::memcpy(reinterpret_cast<void*>(to + row * to_pitch), reinterpret_cast<void*>(from + row * from_pitch), bytes);
}

size_t taken = 0;  // bytes of device memory in use
int own_capability = 0, multiprocessors = 132;

int capability() {
  if (own_capability != 0) return own_capability;
  const char* text = std::getenv("SHARP_FAKE_CAPABILITY");
  return text == nullptr ? 90 : std::atoi(text);
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default"))) CUresult

// Returns all events since the last call, one per line.
extern "C" __attribute__((visibility("default"))) const char* fake_events() {
  static std::string taken;
  taken.swap(events);
  events.clear();
  return taken.c_str();
}

// Sets the compute capability of the device and the number of its multiprocessors.
extern "C" __attribute__((visibility("default"))) void fake_device(int capability, int count) {
  own_capability = capability;
  multiprocessors = count;
}

// Sets the function that does the work of every launch.
extern "C" __attribute__((visibility("default"))) void fake_compute(Compute function) { compute = function; }

FAKE cuGetErrorString(CUresult error, const char** words) {
  *words = error == CUDA_ERROR_INVALID_IMAGE ? "device kernel image is invalid" : "another error";
  return CUDA_SUCCESS;
}

FAKE cuInit(unsigned) { return std::getenv("SHARP_FAKE_NO_DEVICE") ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS; }

FAKE cuDriverGetVersion(int* version) {
  *version = 13010;
  return CUDA_SUCCESS;
}

FAKE cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}

FAKE cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return CUDA_SUCCESS;
}

FAKE cuDeviceGetName(char* name, int length, CUdevice) {
  std::strncpy(name, "a fake GPU", length);
  return CUDA_SUCCESS;
}

FAKE cuDeviceTotalMem(size_t* bytes, CUdevice) {
  *bytes = size_t{8} << 30;
  return CUDA_SUCCESS;
}

FAKE cuDevicePrimaryCtxRetain(CUcontext*, CUdevice) { return CUDA_SUCCESS; }
FAKE cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
FAKE cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
FAKE cuCtxPopCurrent(CUcontext*) { return CUDA_SUCCESS; }
FAKE cuCtxSynchronize() { return CUDA_SUCCESS; }

// The fake runtime calls this with the bytes that it allocates, and with negative bytes that it frees.
extern "C" __attribute__((visibility("default"))) void fake_take(size_t bytes) { taken += bytes; }

FAKE cuMemGetInfo(size_t* free, size_t* total) {
  *free = (size_t{6} << 30) - taken;
  *total = size_t{8} << 30;
  return CUDA_SUCCESS;
}

FAKE cuMemsetD8(CUdeviceptr to, unsigned char value, size_t bytes) {
  events += "clear " + std::to_string(to) + " bytes=" + std::to_string(bytes) + "\n";
  if (host_memory()) std::memset(reinterpret_cast<void*>(to), value, bytes);
  return CUDA_SUCCESS;
}

FAKE cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}

FAKE cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) *value = capability() / 10;
  if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) *value = capability() % 10;
  if (attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) *value = multiprocessors;
  return CUDA_SUCCESS;
}

FAKE cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned, CUlibraryOption*, void**,
                       unsigned) {
  if (std::strncmp(static_cast<const char*>(code), "broken", 6) == 0) return CUDA_ERROR_INVALID_IMAGE;
  *library = reinterpret_cast<CUlibrary>(const_cast<void*>(code));
  return CUDA_SUCCESS;
}

FAKE cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  events += "kernel " + std::string(name) + " of " + reinterpret_cast<const char*>(library) + "\n";
  *kernel = reinterpret_cast<CUkernel>(library);
  return CUDA_SUCCESS;
}

FAKE cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

FAKE cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice) {
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    events += "shared " + std::to_string(value) + " for " + reinterpret_cast<const char*>(kernel) + "\n";
  return CUDA_SUCCESS;
}

FAKE cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                    unsigned shared, CUstream stream, void** parameters, void**) {
  std::istringstream image(reinterpret_cast<const char*>(function));
  std::ostringstream line;
  std::string word;
  image >> word;
  line << "launch " << word << " grid=" << x << "," << y << "," << z << " threads=" << threads << " shared=" << shared
       << " stream=" << reinterpret_cast<uintptr_t>(stream);
  for (int index = 0; image >> word; ++index) {
    const size_t colon = word.find(':');
    const std::string type = word.substr(colon + 1);
    line << " " << word.substr(0, colon) << "=";
    if (type == "ptr" || type == "i64") line << *static_cast<uint64_t*>(parameters[index]);
    if (type == "i32") line << *static_cast<int32_t*>(parameters[index]);
    if (type == "fp32") line << *static_cast<float*>(parameters[index]);
  }
  events += line.str() + "\n";
  if (compute != nullptr) compute(reinterpret_cast<const char*>(function), x, y, z, parameters);
  return CUDA_SUCCESS;
}

FAKE cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  events += "copy to=" + std::to_string(to) + " from=" + std::to_string(from) + " bytes=" + std::to_string(bytes) +
            " stream=" + std::to_string(reinterpret_cast<uintptr_t>(stream)) + "\n";
  copy_rows(to, 0, from, 0, bytes, 1);
  return CUDA_SUCCESS;
}

FAKE cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream) {
  events += "copy rows to=" + std::to_string(copy->dstDevice) + " from=" + std::to_string(copy->srcDevice) +
            " bytes=" + std::to_string(copy->WidthInBytes) + " rows=" + std::to_string(copy->Height) +
            " pitches=" + std::to_string(copy->srcPitch) + "," + std::to_string(copy->dstPitch) +
            " stream=" + std::to_string(reinterpret_cast<uintptr_t>(stream)) + "\n";
  copy_rows(copy->dstDevice, copy->dstPitch, copy->srcDevice, copy->srcPitch, copy->WidthInBytes, copy->Height);
  return CUDA_SUCCESS;
}

FAKE cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream) {
  events +=
      "set to=" + std::to_string(to) + " value=" + std::to_string(value) + " bytes=" + std::to_string(bytes) + "\n";
  if (host_memory()) std::memset(reinterpret_cast<void*>(to), value, bytes);
  return CUDA_SUCCESS;
}

FAKE cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  *memory = std::malloc(bytes);
  events += "page-locked bytes=" + std::to_string(bytes) + " flags=" + std::to_string(flags) + "\n";
  return CUDA_SUCCESS;
}

FAKE cuMemFreeHost(void* memory) {
  std::free(memory);
  return CUDA_SUCCESS;
}

FAKE cuMemAlloc(CUdeviceptr* memory, size_t bytes) {
  *memory = reinterpret_cast<CUdeviceptr>(std::calloc(bytes, 1));
  taken += bytes;
  return CUDA_SUCCESS;
}

FAKE cuMemFree(CUdeviceptr memory) {
  std::free(reinterpret_cast<void*>(memory));
  return CUDA_SUCCESS;
}

FAKE cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  events += "write bytes=" + std::to_string(bytes) + " stream=" + std::to_string(reinterpret_cast<uintptr_t>(stream)) + "\n";
  if (host_memory()) std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return CUDA_SUCCESS;
}

FAKE cuStreamSynchronize(CUstream stream) {
  events += "wait for stream " + std::to_string(reinterpret_cast<uintptr_t>(stream)) + "\n";
  return CUDA_SUCCESS;
}

FAKE cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  events += "read bytes=" + std::to_string(bytes) + "\n";
  if (host_memory()) std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return CUDA_SUCCESS;
}
