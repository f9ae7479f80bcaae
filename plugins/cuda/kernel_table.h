// What build_kernels.py packs: machine code of every kernel for every GPU, and how each is launched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sharp::cuda {

struct Tile {
  int64_t rows, keys;
};

struct KernelImage {
  const char* kernel;  // the variant; several images have the same, one for each target
  const char* entry;   // symbol in the image
  int capability;      // 90 is 9.0; of PTX the oldest GPU that it is for
  bool ptx;
  bool exact;  // only this capability, not later ones of the same major version
  const unsigned char* content;
  size_t bytes;
  unsigned shared_bytes;  // dynamic shared memory of a block
  unsigned threads;       // of a block
  const char* arguments;  // "name:type name:type ...", types ptr, i32, i64, fp32
  int hidden_arguments;   // pointers after those, all null
  Tile tile;
};

extern const KernelImage kKernelImages[];
extern const size_t kKernelImageCount;

// What grids and scratch memory follow from; plugins/triton's variants.py, tiles.py and options.py say what each is.
extern const int64_t kDecodeWaves, kSplitKeys, kMostSplits, kMostTokens, kMostRows, kMostParts, kPartKeys,
    kMostPromptRows, kListedKeys, kEntmaxCounts, kSparsemaxCounts;

// A hash of the kernels' sources: code of others may take the same arguments in another meaning.
extern const int64_t kSources;

}  // namespace sharp::cuda
