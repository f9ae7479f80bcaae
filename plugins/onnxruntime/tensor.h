// An input tensor of a node, and the sentences for one that does not fit.
#pragma once

#include <string>
#include <vector>

#include "inputs.h"

namespace sharp::ort {

using Shape = std::vector<int64_t>;

inline std::string text_of(const Shape& shape) {
  std::string text = "[";
  for (size_t axis = 0; axis < shape.size(); ++axis) text += (axis ? ", " : "") + std::to_string(shape[axis]);
  return text + "]";
}

// Input `index`; absent when it is not given or, where `empty_is_absent`, has rank 1 and no elements.
class NamedTensor {
 public:
  NamedTensor(const Ort::KernelContext& context, size_t index, const char* name, bool empty_is_absent) : name_(name) {
    if (index >= context.GetInputCount()) return;
    const Ort::ConstValue value = context.GetInput(index);
    if (static_cast<const OrtValue*>(value) == nullptr) return;
    const auto info = value.GetTensorTypeAndShapeInfo();
    shape_ = info.GetShape();
    elements_ = info.GetElementCount();
    if (empty_is_absent && shape_.size() == 1 && elements_ == 0) return;
    data_ = value.GetTensorRawData();
    given_ = true;
  }

  bool given() const { return given_; }
  size_t elements() const { return elements_; }
  template <typename T>
  const T* data() const {
    return given_ ? static_cast<const T*>(data_) : nullptr;
  }
  int64_t dimension(size_t axis) const { return shape_[axis]; }

  void expect_rank(size_t rank, const char* dimensions) const {
    if (!given_) throw InputError(std::string(name_) + " is missing; the op needs it");
    if (shape_.size() != rank) fail(std::string("must have the dimensions ") + dimensions);
  }

  void expect_shape(const Shape& expected, const char* dimensions) const {
    expect_rank(expected.size(), dimensions);
    if (shape_ != expected) fail(std::string("must be ") + dimensions + " = " + text_of(expected));
  }

  [[noreturn]] void fail(const std::string& rule) const {
    throw InputError(std::string(name_) + " has shape " + text_of(shape_) + "; it " + rule);
  }

 private:
  const char* name_;
  bool given_ = false;
  size_t elements_ = 0;
  Shape shape_;
  const void* data_ = nullptr;
};

}  // namespace sharp::ort
