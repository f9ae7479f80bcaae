// Arrays that begin with a cache line, so that no vector of theirs lies in two.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace sharp::cpu {

constexpr std::align_val_t kCacheLine{64};

struct AlignedDelete {
  void operator()(void* memory) const { ::operator delete(memory, kCacheLine); }
};

template <typename T>
using AlignedArray = std::unique_ptr<T[], AlignedDelete>;

// Not filled: it would write to memory that is written anyway.
template <typename T>
AlignedArray<T> aligned_array(int64_t size) {
  return AlignedArray<T>(static_cast<T*>(::operator new(static_cast<size_t>(size) * sizeof(T), kCacheLine)));
}

}  // namespace sharp::cpu
