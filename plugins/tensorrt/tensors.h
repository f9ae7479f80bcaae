// The inputs of a node as TensorRT describes them, and what of them both plugins read alike.
#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <string>

#include "attributes.h"
#include "sharp_head_params.h"

namespace sharp::tensorrt {

inline int64_t elements(const nvinfer1::Dims& dims) {
  int64_t product = 1;
  for (int32_t index = 0; index < dims.nbDims; ++index) product *= dims.d[index];
  return product;
}

// Whether a cache of the type has scales.
inline bool has_scales(nvinfer1::DataType type) {
  return type == nvinfer1::DataType::kINT8 || type == nvinfer1::DataType::kFP8;
}

inline size_t bytes_of(nvinfer1::DataType type) {
  return type == nvinfer1::DataType::kFLOAT ? 4 : has_scales(type) ? 1 : 2;
}

inline SharpType sharp_type(nvinfer1::DataType type) {
  if (type == nvinfer1::DataType::kHALF) return SHARP_FLOAT16;
  if (type == nvinfer1::DataType::kBF16) return SHARP_BFLOAT16;
  if (type == nvinfer1::DataType::kINT8) return SHARP_INT8;
  if (type == nvinfer1::DataType::kFP8) return SHARP_FP8;
  return SHARP_FLOAT32;
}

// Descriptions of either kind as plain shapes and types; -1 where a size is not known yet.
template <int32_t kMost>
struct Shapes {
  nvinfer1::Dims dims[kMost];
  nvinfer1::DataType types[kMost];

  Shapes(const nvinfer1::PluginTensorDesc* inputs, int32_t count) {
    for (int32_t input = 0; input < std::min(count, kMost); ++input) {
      dims[input] = inputs[input].dims;
      types[input] = inputs[input].type;
    }
  }
  Shapes(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t count, bool largest) {
    for (int32_t input = 0; input < std::min(count, kMost); ++input) {
      dims[input] = largest ? inputs[input].max : inputs[input].desc.dims;
      types[input] = inputs[input].desc.type;
    }
  }
};

// Throws InputError.
inline void require(bool holds, const char* what) {
  if (!holds) throw InputError(what);
}

inline void require_count(int32_t count, int32_t least, int32_t most) {
  if (count < least || count > most)
    throw InputError("it has " + std::to_string(count) + " inputs, but must have " + std::to_string(least) +
                     (most == least ? "" : " to " + std::to_string(most)));
}

inline void require_rank(const char* name, const nvinfer1::Dims& dims, int32_t rank) {
  if (dims.nbDims != rank)
    throw InputError(std::string(name) + " has " + std::to_string(dims.nbDims) + " dimensions, but must have " +
                     std::to_string(rank));
}

// What both ops take per query head; null for an input that is left out. `Problem` is one of sharp_cuda.h's.
template <typename Problem>
void read_head_inputs(Problem& problem, const nvinfer1::Dims* head_params, const nvinfer1::Dims* alibi_slopes) {
  if (head_params != nullptr) {
    require(head_params->nbDims == 2 && head_params->d[0] == problem.q_heads,
            "head_params must be [q_heads, parameters]");
    problem.head_params_width = head_params->d[1];
  }
  const char* mistake = sharp_head_params_mistake(problem.attributes.normalizer, problem.head_params_width);
  require(mistake == nullptr, mistake);
  problem.alibi = alibi_slopes != nullptr;
  if (alibi_slopes != nullptr)
    require(alibi_slopes->nbDims == 1 && alibi_slopes->d[0] == problem.q_heads, "alibi_slopes must be [q_heads]");
}

// A status of libsharp_cuda.so.
inline void check(int status) {
  if (status != 0) throw std::runtime_error(sharp_cuda_last_error());
}

}  // namespace sharp::tensorrt
