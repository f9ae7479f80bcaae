#include "kernels.h"

#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

namespace sharp::cuda {
namespace {

constexpr unsigned kSharedWithoutAsking = 48 << 10;  // bytes of shared memory that a kernel may use without opting in

enum class Type { kPointer, kInt32, kInt64, kFloat32 };

struct Parameter {
  int argument;
  Type type;
};

struct LoadedKernel {
  const KernelImage* image;
  CUkernel kernel;
  std::vector<Parameter> parameters;
};

Type type_named(const std::string& name) {
  if (name == "ptr") return Type::kPointer;
  if (name == "i32") return Type::kInt32;
  if (name == "i64") return Type::kInt64;
  if (name == "fp32") return Type::kFloat32;
  throw Error("a kernel has an argument of the type " + name + ", which this library does not know");
}

int argument_named(const std::string& name, const char* kernel) {
  for (int argument = 0; argument < kArgumentCount; ++argument)
    if (name == kArgumentNames[argument]) return argument;
  throw Error("kernel " + std::string(kernel) + " wants an argument " + name + ", which this library does not have");
}

std::vector<Parameter> parameters_of(const KernelImage& image) {
  std::vector<Parameter> parameters;
  std::istringstream words(image.arguments);
  for (std::string word; words >> word;) {
    const size_t colon = word.find(':');
    parameters.push_back({argument_named(word.substr(0, colon), image.kernel), type_named(word.substr(colon + 1))});
  }
  return parameters;
}

CUdevice current_device() {
  CUdevice device;
  check(driver().cuCtxGetDevice(&device), "finding the current device");
  return device;
}

int attribute_of(CUdevice device, CUdevice_attribute attribute) {
  int value;
  check(driver().cuDeviceGetAttribute(&value, attribute, device), "asking the device what it can do");
  return value;
}

int capability_of(CUdevice device) {
  return 10 * attribute_of(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
         attribute_of(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
}

LoadedKernel load(const std::string& name, CUdevice device) {
  const int capability = capability_of(device);
  const KernelImage* image = choose_image(name, capability);
  if (image == nullptr)
    throw Error("libsharp_cuda.so has no kernel " + name + " for compute capability " +
                std::to_string(capability / 10) + "." + std::to_string(capability % 10) +
                "; `sharp build FOLDER --backend cuda` compiles those of an exported model");
  LoadedKernel loaded{image, nullptr, parameters_of(*image)};
  CUlibrary library;
  check(driver().cuLibraryLoadData(&library, image->content, nullptr, nullptr, 0, nullptr, nullptr, 0),
        ("loading kernel " + name).c_str());
  check(driver().cuLibraryGetKernel(&loaded.kernel, library, image->entry), ("finding kernel " + name).c_str());
  if (image->shared_bytes > kSharedWithoutAsking)
    check(driver().cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                        static_cast<int>(image->shared_bytes), loaded.kernel, device),
          ("shared memory for kernel " + name).c_str());
  return loaded;
}

// Kernels are never unloaded: at exit the driver may be gone first, and a kernel launched once is launched again.
const LoadedKernel& loaded_kernel(const std::string& name) {
  static std::mutex mutex;
  static auto& kernels = *new std::map<std::pair<CUdevice, std::string>, LoadedKernel>;
  const std::pair<CUdevice, std::string> key(current_device(), name);
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = kernels.find(key);
  if (found == kernels.end()) found = kernels.emplace(key, load(name, key.first)).first;
  return found->second;
}

void pass(void* to, Parameter parameter, const Arguments& arguments) {
  const Arguments::Value& value = arguments.get(parameter.argument);
  if (parameter.type == Type::kInt32) {
    if (value.integer != static_cast<int32_t>(value.integer))
      throw Error(std::string(kArgumentNames[parameter.argument]) + " is " + std::to_string(value.integer) +
                  ", but must fit 32 bits");
    const int32_t integer = static_cast<int32_t>(value.integer);
    std::memcpy(to, &integer, sizeof(integer));
  } else {
    std::memcpy(to, &value, sizeof(value));  // a float takes the first four bytes
  }
}

}  // namespace

const KernelImage* choose_image(const std::string& kernel, int capability) {
  const KernelImage* best = nullptr;
  const auto consider = [&](const KernelImage& image) {
    if (kernel != image.kernel || image.capability > capability) return;
    const bool runs =
        image.ptx || image.capability == capability || (!image.exact && image.capability / 10 == capability / 10);
    if (!runs) return;
    const bool better =
        best == nullptr || (best->ptx && !image.ptx) || (best->ptx == image.ptx && image.capability > best->capability);
    if (better) best = &image;
  };
  for (size_t index = 0; index < kKernelImageCount; ++index) consider(kKernelImages[index]);
  for_each_added(consider);
  return best;
}

Tile tile_of(const std::string& kernel) { return loaded_kernel(kernel).image->tile; }

int64_t multiprocessors() { return attribute_of(current_device(), CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT); }

int compute_capability() { return capability_of(current_device()); }

void load_kernel(const std::string& kernel) {
  CUfunction function;  // getting the function loads the code now, not at the first launch
  check(driver().cuKernelGetFunction(&function, loaded_kernel(kernel).kernel), ("loading kernel " + kernel).c_str());
}

void launch_kernel(const std::string& kernel, Grid grid, const Arguments& arguments, CUstream stream) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (grid.x > std::numeric_limits<int32_t>::max() || grid.y > 65535 || grid.z > 65535)
    throw Error("kernel " + kernel + " would need a grid of " + std::to_string(grid.x) + " x " +
                std::to_string(grid.y) + " x " + std::to_string(grid.z) + " blocks, which is more than CUDA has");
  const LoadedKernel& loaded = loaded_kernel(kernel);
  const size_t count = loaded.parameters.size();
  std::vector<uint64_t> values(count + 1, 0);  // the last value is the null of all hidden arguments
  std::vector<void*> parameters(count + loaded.image->hidden_arguments, &values[count]);
  for (size_t index = 0; index < count; ++index) {
    pass(&values[index], loaded.parameters[index], arguments);
    parameters[index] = &values[index];
  }
  // A launch accepts a CUkernel as CUfunction: the driver uses the current context's function.
  check(driver().cuLaunchKernel(reinterpret_cast<CUfunction>(loaded.kernel), static_cast<unsigned>(grid.x),
                                static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z), loaded.image->threads, 1,
                                1, loaded.image->shared_bytes, stream, parameters.data(), nullptr),
        ("launching kernel " + kernel).c_str());
}

}  // namespace sharp::cuda
