// Conversion of tensors of 16-bit types from and to float32, in which the kernels compute.
#pragma once

#include <vector>

#include "element_types.h"
#include "half.h"

namespace sharp::ort {

// An input of `count` numbers as float32: its own memory if it is float32, otherwise a copy converted from float16 or
// bfloat16; null for null.
class FloatInput {
 public:
  FloatInput(const void* from, size_t count, ONNXTensorElementDataType type)
      : floats_(static_cast<const float*>(from)) {
    if (type == kFloat32 || from == nullptr) return;
    converted_.resize(count);
    floats_ = converted_.data();
    for (size_t index = 0; index < count; ++index)
      converted_[index] = type == kFloat16 ? cpu::to_float(static_cast<const cpu::Float16*>(from)[index])
                                           : cpu::to_float(static_cast<const cpu::Bfloat16*>(from)[index]);
  }
  const float* get() const { return floats_; }

 private:
  const float* floats_;
  std::vector<float> converted_;
};

// An output of `count` numbers that is written as float32; `finish`, which must be called after that, converts it if
// its type is float16 or bfloat16.
class FloatOutput {
 public:
  FloatOutput(void* to, size_t count, ONNXTensorElementDataType type) : to_(to), type_(type) {
    if (type != kFloat32) floats_.resize(count);
  }
  float* get() { return type_ == kFloat32 ? static_cast<float*>(to_) : floats_.data(); }
  void finish() const {
    for (size_t index = 0; index < floats_.size(); ++index)
      if (type_ == kFloat16)
        static_cast<cpu::Float16*>(to_)[index] = cpu::to_float16(floats_[index]);
      else
        static_cast<cpu::Bfloat16*>(to_)[index] = cpu::to_bfloat16(floats_[index]);
  }

 private:
  void* to_;
  ONNXTensorElementDataType type_;
  std::vector<float> floats_;
};

}  // namespace sharp::ort
