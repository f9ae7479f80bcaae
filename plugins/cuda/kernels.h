// Kernels of the package on the current device: which image, loaded once, launched by name.
#pragma once

#include <functional>
#include <string>

#include "arguments.h"
#include "driver.h"
#include "kernel_table.h"

namespace sharp::cuda {

struct Grid {
  int64_t x = 1, y = 1, z = 1;
};

// Adds the kernels of a folder. Throws Error.
void add_kernels(const std::string& folder);

// Hears of the kernels that were added.
void for_each_added(const std::function<void(const KernelImage&)>& consider);

// The image of `kernel` for a GPU: of the same major version the newest that it can run, else PTX, else null.
const KernelImage* choose_image(const std::string& kernel, int capability);

// The kernel's tiles on the current device. Throws Error.
Tile tile_of(const std::string& kernel);

// Multiprocessors of the current device. Throws Error.
int64_t multiprocessors();

// Compute capability of the current device: 90 is 9.0. Throws Error.
int compute_capability();

// Loads the code of `kernel` into the current context. Throws Error.
void load_kernel(const std::string& kernel);

// Throws Error; an empty grid does nothing.
void launch_kernel(const std::string& kernel, Grid grid, const Arguments& arguments, CUstream stream);

}  // namespace sharp::cuda
