// The kernels of the package on the current device: chosen for the device, loaded once, launched by name.
#pragma once

#include <functional>
#include <string>

#include "arguments.h"
#include "driver.h"
#include "kernel_table.h"

namespace sharp::cuda {

// The numbers of blocks of a launch; at most 2^31 - 1 along x, and 65535 along y and z.
struct Grid {
  int64_t x = 1, y = 1, z = 1;
};

// Adds the kernels of a folder to those that are built in, for the rest of the process. Throws Error, and then adds
// nothing, if the folder cannot be read, is damaged, or was written by another version of Sharp.
void add_kernels(const std::string& folder);

// Calls `consider` for each image that add_kernels added.
void for_each_added(const std::function<void(const KernelImage&)>& consider);

// Returns the image of `kernel` for a GPU of this compute capability (90 is 9.0): the newest of its major version that
// it can run, else PTX, else null.
const KernelImage* choose_image(const std::string& kernel, int capability);

// Returns the kernel's tile on the current device, and loads the kernel. Throws Error if the library lacks the kernel.
Tile tile_of(const std::string& kernel);

// Returns the number of multiprocessors of the current device. Throws Error.
int64_t multiprocessors();

// Returns the compute capability of the current device; 90 is 9.0. Throws Error.
int compute_capability();

// Loads the code of `kernel` into the current context. Throws Error.
void load_kernel(const std::string& kernel);

// Launches `kernel` on `stream`, and loads the kernel first if needed; an empty grid does nothing. Throws Error.
void launch_kernel(const std::string& kernel, Grid grid, const Arguments& arguments, CUstream stream);

}  // namespace sharp::cuda
