// The inputs of a node as TensorRT describes them, and the functions with which both plugins read them.
#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <string>
#include <vector>

#include "attributes.h"

namespace sharp::tensorrt {

inline int64_t elements(const nvinfer1::Dims& dims) {
  int64_t product = 1;
  for (int32_t index = 0; index < dims.nbDims; ++index) product *= dims.d[index];
  return product;
}

inline SharpType sharp_type(nvinfer1::DataType type) {
  if (type == nvinfer1::DataType::kHALF) return SHARP_FLOAT16;
  if (type == nvinfer1::DataType::kBF16) return SHARP_BFLOAT16;
  if (type == nvinfer1::DataType::kINT8) return SHARP_INT8;
  if (type == nvinfer1::DataType::kFP8) return SHARP_FP8;
  return SHARP_FLOAT32;
}

inline size_t bytes_of(nvinfer1::DataType type) { return sharp::bytes_of(sharp_type(type)); }

// Plain shapes and types from either kind of TensorRT's descriptions; a size that is not known yet is -1.
struct Tensors {
  Tensors(const nvinfer1::PluginTensorDesc* inputs, int32_t count, int32_t most) : shapes(most) {
    for (int32_t input = 0; input < std::min(count, most); ++input) add(input, inputs[input].dims, inputs[input].type);
  }
  Tensors(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t count, int32_t most, bool largest) : shapes(most) {
    for (int32_t input = 0; input < std::min(count, most); ++input)
      add(input, largest ? inputs[input].max : inputs[input].desc.dims, inputs[input].desc.type);
  }
  void add(int32_t input, const nvinfer1::Dims& dims, nvinfer1::DataType type) {
    shapes[input] = {true, {dims.d, dims.d + dims.nbDims}};
    types.push_back(type);
  }

  std::vector<InputShape> shapes;
  std::vector<nvinfer1::DataType> types;
};

// Throws InputError with `what` unless `holds`.
inline void require(bool holds, const char* what) {
  if (!holds) throw InputError(what);
}

inline void require_count(int32_t count, int32_t least, int32_t most) {
  if (count < least || count > most)
    throw InputError("it has " + std::to_string(count) + " inputs, but must have " + std::to_string(least) +
                     (most == least ? "" : " to " + std::to_string(most)));
}

// Sets the buffers of a call to those of the inputs that are given.
template <typename Op>
void set_inputs(const Tensors& tensors, const void* const* inputs, typename Op::Call& call) {
  for (size_t input = 0; input < tensors.types.size(); ++input)
    if (is_there(Op::kInputs[input], tensors.shapes[input]))
      *reinterpret_cast<const void**>(reinterpret_cast<char*>(&call) + Op::kInputs[input].buffer) = inputs[input];
}

// Whether the definition allows a type for an input whose type is neither T nor C.
inline bool fits(TensorType expected, nvinfer1::DataType type) {
  switch (expected) {
    case TensorType::kFloat:
      return type == nvinfer1::DataType::kFLOAT;
    case TensorType::kInt8:
      return type == nvinfer1::DataType::kINT8;
    case TensorType::kBool:  // int32 works, too, because the kernels read the first byte of 0 or 1
      return type == nvinfer1::DataType::kBOOL || type == nvinfer1::DataType::kINT32;
    default:
      return type == nvinfer1::DataType::kINT32;
  }
}

// Throws the last error of libsharp_cuda.so unless `status` is 0.
inline void check(int status) {
  if (status != 0) throw std::runtime_error(sharp_cuda_last_error());
}

}  // namespace sharp::tensorrt
