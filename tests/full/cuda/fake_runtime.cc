// CUDA's runtime library without a GPU, as far as ONNX Runtime's CUDA provider needs it to run: device memory is host
// memory, copies are made at once, kernels compute nothing. It records calls that a step must not make, and
// calls about graphs. native.py adds the functions that are missing here; they return 0.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

std::string events;
bool capturing = false;

void note(const std::string& event) { events += event + (capturing ? " while capturing\n" : "\n"); }

void* new_handle() {
  static intptr_t last = 0x5000;
  return reinterpret_cast<void*>(last += 16);
}

int allocate(void** memory, size_t bytes) {
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*memory, 0, bytes);
  return 0;
}

template <typename T>
void put(char* structure, size_t offset, T value) {
  std::memcpy(structure + offset, &value, sizeof(value));
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default"))) int

// Returns all events since the last call, one per line.
extern "C" __attribute__((visibility("default"))) const char* fake_runtime_events() {
  static std::string taken;
  taken.swap(events);
  events.clear();
  return taken.c_str();
}

extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorString(int) { return "an error"; }
extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorName(int) { return "cudaErrorFake"; }

FAKE cudaGetDeviceCount(int* count) { return *count = 1, 0; }
FAKE cudaGetDevice(int* device) { return *device = 0; }
FAKE cudaRuntimeGetVersion(int* version) { return *version = 13000, 0; }
FAKE cudaDriverGetVersion(int* version) { return *version = 13000, 0; }
FAKE cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = size_t{8} << 30, 0; }
FAKE cudaPointerGetAttributes(void*, const void*) { return 1; }
FAKE cudaDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 75 ? 9 : 1, 0; }

// Fills the fields of cudaDeviceProp that lie at the same place in CUDA 12 and 13.
FAKE cudaGetDeviceProperties(char* properties, int) {
  std::memset(properties, 0, 700);
  std::strcpy(properties, "a fake GPU");
  put(properties, 288, size_t{8} << 30);  // totalGlobalMem
  put(properties, 296, size_t{48} << 10);
  put(properties, 304, 65536);
  put(properties, 308, 32);  // warpSize
  put(properties, 320, 1024);
  for (size_t axis = 0; axis < 3; ++axis) {
    put(properties, 324 + 4 * axis, 1024);
    put(properties, 336 + 4 * axis, 65535);
  }
  put(properties, 360, 9);  // major
  put(properties, 384, 132);
  return 0;
}

FAKE cudaMalloc(void** memory, size_t bytes) {
  static const auto take = reinterpret_cast<void (*)(size_t)>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "fake_take"));
  take(bytes);
  return note("allocate " + std::to_string(bytes)), allocate(memory, bytes);
}
FAKE cudaMallocHost(void** memory, size_t bytes) { return allocate(memory, bytes); }
FAKE cudaHostAlloc(void** memory, size_t bytes, unsigned) { return allocate(memory, bytes); }
FAKE cudaFree(void* memory) { return std::free(memory), 0; }
FAKE cudaFreeHost(void* memory) { return std::free(memory), 0; }
FAKE cudaMemset(void* memory, int value, size_t bytes) { return std::memset(memory, value, bytes), 0; }
FAKE cudaMemsetAsync(void* memory, int value, size_t bytes, void*) { return std::memset(memory, value, bytes), 0; }
FAKE cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  note("copy " + std::to_string(kind) + " of " + std::to_string(bytes));
  return std::memcpy(to, from, bytes), 0;
}
FAKE cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void*) {
  note("copy " + std::to_string(kind) + " of " + std::to_string(bytes));
  return std::memcpy(to, from, bytes), 0;
}

FAKE cudaStreamCreate(void** stream) { return *stream = new_handle(), 0; }
FAKE cudaStreamCreateWithFlags(void** stream, unsigned) { return *stream = new_handle(), 0; }
FAKE cudaEventCreate(void** event) { return *event = new_handle(), 0; }
FAKE cudaEventCreateWithFlags(void** event, unsigned) { return *event = new_handle(), 0; }
FAKE cudaStreamSynchronize(void*) { return note("wait"), 0; }
FAKE cudaDeviceSynchronize() { return note("wait"), 0; }

FAKE cudaStreamBeginCapture(void*, int) { return note("capture"), capturing = true, 0; }
FAKE cudaStreamIsCapturing(void*, int* status) { return *status = capturing, 0; }
FAKE cudaStreamEndCapture(void*, void** graph) { return capturing = false, *graph = new_handle(), 0; }
FAKE cudaGraphInstantiate(void** executable, void*, unsigned long long) { return *executable = new_handle(), 0; }
FAKE cudaGraphLaunch(void*, void*) { return note("replay"), 0; }

// A function of the real driver, which the fake driver lacks.
FAKE cuTensorMapEncodeTiled() { return 0; }
