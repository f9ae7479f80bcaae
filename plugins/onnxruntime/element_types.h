// The types of the ops' tensors.
#pragma once

#include "ort.h"
#include "sharp_op.h"

namespace sharp::ort {

constexpr ONNXTensorElementDataType kFloat32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr ONNXTensorElementDataType kFloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr ONNXTensorElementDataType kBfloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
constexpr ONNXTensorElementDataType kInt8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
constexpr ONNXTensorElementDataType kFloat8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN;

// The types of one version of an op. `compute` is T, of query, key, value and output; `cache` is C, of the caches or
// the past. `of` returns ONNX's number of a parameter's type.
struct ElementTypes {
  ONNXTensorElementDataType compute, cache;

  ONNXTensorElementDataType of(TensorType type) const {
    switch (type) {
      case TensorType::kT:
        return compute;
      case TensorType::kC:
        return cache;
      case TensorType::kFloat:
        return kFloat32;
      case TensorType::kInt32:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
      case TensorType::kInt8:
        return kInt8;
      case TensorType::kBool:
        break;
    }
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
  }
};

// Returns the type's number in a call; SHARP_FLOAT32 for a type that no call has.
constexpr SharpType sharp_type(ONNXTensorElementDataType type) {
  if (type == kFloat16) return SHARP_FLOAT16;
  if (type == kBfloat16) return SHARP_BFLOAT16;
  if (type == kFloat8) return SHARP_FP8;
  return type == kInt8 ? SHARP_INT8 : SHARP_FLOAT32;
}

}  // namespace sharp::ort
