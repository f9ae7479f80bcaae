// The types of the ops' tensors.
#pragma once

#include "ort.h"
#include "problem.h"

namespace sharp::ort {

constexpr ONNXTensorElementDataType kFloat32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr ONNXTensorElementDataType kFloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr ONNXTensorElementDataType kBfloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
constexpr ONNXTensorElementDataType kInt8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
constexpr ONNXTensorElementDataType kFloat8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN;

// T: query, key, value and output; C: the caches, or the past.
struct ElementTypes {
  ONNXTensorElementDataType compute, cache;

  cpu::CacheType cache_type() const {
    if (cache == kFloat16) return cpu::CacheType::kFloat16;
    if (cache == kBfloat16) return cpu::CacheType::kBfloat16;
    if (cache == kFloat8) return cpu::CacheType::kFloat8;
    return cache == kInt8 ? cpu::CacheType::kInt8 : cpu::CacheType::kFloat32;
  }
};

}  // namespace sharp::ort
