#include "aligned.h"

#include <map>
#include <mutex>
#include <new>

namespace sharp::cpu {
namespace {

constexpr std::align_val_t kCacheLine{64};
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kMostKept = 0;  // no array is kept, so that AddressSanitizer sees every free
#else
constexpr size_t kMostKept = size_t{32} << 20;
#endif
constexpr size_t kLeastKept = size_t{64} << 10;  // the C library itself keeps smaller arrays

struct Kept {
  std::mutex mutex;
  std::multimap<size_t, void*> arrays;  // by size
  size_t bytes = 0;
};

// The kept arrays are never destroyed, because threads may outlive static objects.
Kept& kept() {
  static Kept* const all = new Kept;
  return *all;
}

// Rounds up to one of four sizes per power of 2, so that a context that grows by a token mostly needs the same size.
size_t size_class(size_t bytes) {
  size_t step = kLeastKept / 4;
  while (step * 8 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

}  // namespace

void* take_aligned(size_t bytes) {
  if (bytes < kLeastKept) return ::operator new(bytes, kCacheLine);
  const size_t size = size_class(bytes);
  {
    const std::lock_guard<std::mutex> lock(kept().mutex);
    const auto found = kept().arrays.find(size);
    if (found != kept().arrays.end()) {
      void* memory = found->second;
      kept().bytes -= size;
      kept().arrays.erase(found);
      return memory;
    }
  }
  return ::operator new(size, kCacheLine);
}

void give_back_aligned(void* memory, size_t bytes) {
  const size_t size = size_class(bytes);
  if (bytes < kLeastKept || size > kMostKept) return ::operator delete(memory, kCacheLine);
  const std::lock_guard<std::mutex> lock(kept().mutex);
  auto& arrays = kept().arrays;
  // The smallest arrays are freed first, because contexts grow.
  for (; kept().bytes + size > kMostKept; arrays.erase(arrays.begin())) {
    kept().bytes -= arrays.begin()->first;
    ::operator delete(arrays.begin()->second, kCacheLine);
  }
  arrays.emplace(size, memory);
  kept().bytes += size;
}

}  // namespace sharp::cpu
