// The table that build_kernels.py writes: machine code of every kernel for every GPU, and how to launch it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sharp::cuda {

// The query rows and keys that a kernel computes together.
struct Tile {
  int64_t rows, keys;
};

// A kernel compiled for one target, and what a launch of it needs.
struct KernelImage {
  const char* kernel;  // the variant; there is one image of it per target
  const char* entry;   // symbol in the image
  int capability;      // 90 is 9.0; for PTX the oldest GPU that it supports
  bool ptx;
  bool exact;  // runs on this capability only, not on later ones of the same major version
  const unsigned char* content;
  size_t bytes;
  unsigned shared_bytes;  // dynamic shared memory per block
  unsigned threads;       // threads per block
  const char* arguments;  // "name:type name:type ...", types ptr, i32, i64, fp32
  int hidden_arguments;   // pointers behind the arguments, all null
  Tile tile;
};

extern const KernelImage kKernelImages[];
extern const size_t kKernelImageCount;

// The constants of the planner; launch_plan.py, tiles.py and options.py in plugins/triton document them.
extern const int64_t kDecodeWaves, kSplitKeys, kMostSplits, kMostTokens, kMostRows, kMostParts, kPartKeys,
    kMostPromptRows, kListedKeys, kEntmaxCounts, kSparsemaxCounts;

// A hash of the kernels' sources, because kernels of other sources may interpret the same arguments differently.
extern const int64_t kSources;

}  // namespace sharp::cuda
