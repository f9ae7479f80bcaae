// Arrays aligned to cache lines, so that no vector of an array crosses a line.
//
// Large arrays are kept for the next call when they are freed. The C library would return them to the system, which
// clears every page that it hands out; under entmax that took a quarter of a decode step.
#pragma once

#include <cstdint>
#include <memory>

namespace sharp::cpu {

// Returns memory of at least this size, aligned to a cache line and not initialized. Throws std::bad_alloc.
void* take_aligned(size_t bytes);

// Frees memory of `take_aligned`, or keeps it for the next call; `bytes` must be the requested size.
void give_back_aligned(void* memory, size_t bytes);

struct AlignedDelete {
  size_t bytes = 0;
  void operator()(void* memory) const { give_back_aligned(memory, bytes); }
};

template <typename T>
using AlignedArray = std::unique_ptr<T[], AlignedDelete>;

// Returns an array that is not initialized, because its content is overwritten anyway.
template <typename T>
AlignedArray<T> aligned_array(int64_t size) {
  const size_t bytes = static_cast<size_t>(size) * sizeof(T);
  return AlignedArray<T>(static_cast<T*>(take_aligned(bytes)), AlignedDelete{bytes});
}

}  // namespace sharp::cpu
