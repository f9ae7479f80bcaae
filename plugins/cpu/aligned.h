// Arrays that begin with a cache line, so that no vector of theirs lies in two.
//
// Large ones are kept when they are freed, for the next call: the C library would return them to the system, which
// clears every page that it hands out, and that took a quarter of a decode step under entmax.
#pragma once

#include <cstdint>
#include <memory>

namespace sharp::cpu {

void* take_aligned(size_t bytes);
void give_back_aligned(void* memory, size_t bytes);

struct AlignedDelete {
  size_t bytes = 0;
  void operator()(void* memory) const { give_back_aligned(memory, bytes); }
};

template <typename T>
using AlignedArray = std::unique_ptr<T[], AlignedDelete>;

// Not filled: it would write to memory that is written anyway.
template <typename T>
AlignedArray<T> aligned_array(int64_t size) {
  const size_t bytes = static_cast<size_t>(size) * sizeof(T);
  return AlignedArray<T>(static_cast<T*>(take_aligned(bytes)), AlignedDelete{bytes});
}

}  // namespace sharp::cpu
