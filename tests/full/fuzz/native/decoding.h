// Turns the fuzzer's bytes into attributes, shapes and numbers of a call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "fake_runtime.h"

namespace sharp::fuzz {

constexpr int64_t kWork = 100'000, kLittleWork = 4'000;  // products of one call, so that thousands take a second
constexpr Type kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;

class Decoder {
 public:
  Decoder(const uint8_t* data, size_t size)
      : data_(data), left_(size), random_(static_cast<uint32_t>(number(0, std::numeric_limits<uint32_t>::max()))) {}

  // Returns a number from as many bytes as the range needs, lowest first; `low` once the bytes are used up.
  int64_t number(int64_t low, int64_t high) {
    const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    uint64_t found = 0;
    for (int shift = 0; shift < 64 && (range >> shift) > 0 && left_ > 0; shift += 8, ++data_, --left_)
      found |= uint64_t{*data_} << shift;
    if (range != std::numeric_limits<uint64_t>::max()) found %= range + 1;
    return static_cast<int64_t>(static_cast<uint64_t>(low) + found);
  }
  bool one_in(int64_t count) { return number(0, count - 1) == count - 1; }  // false once the bytes are used up
  template <typename T, size_t count>
  T one_of(const T (&values)[count]) {
    return values[number(0, count - 1)];
  }

  // Returns a small number mostly, and sometimes an extreme number.
  float any_float() {
    static const float special[] = {0,   -0.0f,    1e-40f,    1e30f,   -1e30f, std::numeric_limits<float>::max(),
                                    NAN, INFINITY, -INFINITY, 0x1p61f, -1.0f,  1.0f};
    if (one_in(4)) return one_of(special);
    return static_cast<float>(number(-1000, 1000)) / 64;
  }

  // Fills a tensor of floating-point numbers or of integers of 8 bits.
  void fill(Tensor& tensor) {
    const int64_t count = tensor.elements(), style = number(0, 6);
    const float size = style == 3 ? 1e18f : style == 4 ? 100.0f : 1.0f;
    for (int64_t index = 0; index < count; ++index) {
      const uint32_t bits = random_();
      float value = (static_cast<float>(bits >> 8) / 8388608.0f - 1.0f) * size;
      if (style == 0) value = 0;
      if (style == 2) value = static_cast<float>(static_cast<int32_t>(bits % 7) - 3);
      if (style == 5 && bits % 16 == 0) {
        const float special[] = {NAN, INFINITY, -INFINITY, 3e38f};
        value = special[bits / 16 % 4];
      }
      if (style == 6) std::memcpy(&value, &bits, sizeof value);
      store(tensor, index, value, bits);
    }
    for (int64_t left = count > 0 ? number(0, 3) : 0; left > 0; --left)
      store(tensor, number(0, count - 1), any_float(), static_cast<uint32_t>(number(0, 255)));
  }

  std::map<std::string, Attribute> attributes() {
    std::map<std::string, Attribute> made;
    static const char* const normalizers[] = {"entmax",  "softmax", "ssa",   "adaptive_softmax",
                                              "sigmoid", "relu",    "relu2", "softpick"};
    made["normalizer"] = std::string(one_of(normalizers));
    made["scale"] = one_in(8) ? any_float() : 0.25f;
    if (one_in(3)) {
      static const float alphas[] = {1.5f, 2.0f, 1.2f, 3.0f, 1.0001f, 50.0f};
      made["alpha"] = one_in(4) ? any_float() : one_of(alphas);
    }
    if (one_in(4)) made["softcap"] = one_in(4) ? any_float() : 4.0f;
    if (one_in(4)) made["window"] = one_in(4) ? number(-3, std::numeric_limits<int64_t>::max()) : number(0, 100);
    if (one_in(4)) made["causal"] = number(-1, 1);
    if (one_in(4)) made["key_bound"] = any_float();
    if (one_in(4)) made["entropy_threshold"] = any_float();
    if (one_in(8)) {
      std::vector<float> coefficients;
      for (int64_t left = number(0, 8); left > 0; --left) coefficients.push_back(any_float());
      made["temperature_coefficients"] = coefficients;
    }
    if (one_in(16)) {
      static const char* const names[] = {"normalizer",
                                          "scale",
                                          "alpha",
                                          "softcap",
                                          "window",
                                          "causal",
                                          "key_bound",
                                          "entropy_threshold",
                                          "temperature_coefficients"};
      const char* name = one_of(names);
      made.erase(name);
      const Attribute others[] = {1.5f, int64_t{1}, std::string("softmax\n"), std::vector<float>{},
                                  std::vector<int64_t>{1, 2}};
      if (!one_in(3)) made[name] = others[number(0, 4)];
    }
    return made;
  }

  // Damages an input's shape or one of its numbers, or leaves an optional input out.
  void damage(const OrtCustomOp& op, Call& call) {
    const size_t index = static_cast<size_t>(number(0, static_cast<int64_t>(call.inputs.size()) - 1));
    std::unique_ptr<Tensor>& input = call.inputs[index];
    const bool optional = op.GetInputCharacteristic(&op, index) == INPUT_OUTPUT_OPTIONAL;
    const int64_t kind = number(0, 3);
    if (kind == 0 && optional) {
      input.reset();
      return;
    }
    if (input == nullptr || kind == 1) {
      Shape shape = input == nullptr ? Shape(number(0, 4), 1) : input->shape;
      for (int64_t left = number(0, 2); left > 0 && !shape.empty(); --left) {
        int64_t& dimension = shape[number(0, static_cast<int64_t>(shape.size()) - 1)];
        static const int64_t sizes[] = {
            0, 1, 2, 3, 5, 16, int64_t{1} << 31, int64_t{1} << 56, std::numeric_limits<int64_t>::max()};
        const int64_t near = std::clamp<int64_t>(dimension, 1, 1 << 20) + number(-1, 1);
        dimension = one_in(2) ? near : one_of(sizes);
      }
      if (one_in(4)) shape.push_back(number(0, 2));
      if (one_in(4) && !shape.empty()) shape.pop_back();
      const int64_t elements = elements_of(shape);
      if (elements < 0 || elements > 1 << 16) return;  // too large for memory
      input = std::make_unique<Tensor>(Tensor::of(op.GetInputType(&op, index), shape));
      if (input->type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32) {
        for (int64_t place = 0; place < elements; ++place) input->as<int32_t>()[place] = any_int();
      } else if (input->type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL) {
        std::fill_n(input->as<bool>(), elements, one_in(2));
      } else {
        fill(*input);
      }
      return;
    }
    const int64_t elements = input->elements();
    if (elements == 0) return;
    const int64_t place = number(0, elements - 1);
    if (input->type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32)
      input->as<int32_t>()[place] = any_int();
    else if (input->type != ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL)
      store(*input, place, any_float(), 0x80);
  }

  int32_t any_int() {
    static const int32_t special[] = {0, -1, -2, std::numeric_limits<int32_t>::max(),
                                      std::numeric_limits<int32_t>::min()};
    return one_in(4) ? one_of(special) : static_cast<int32_t>(number(0, 600));
  }

  uint32_t random() { return static_cast<uint32_t>(random_()); }

 private:
  static void store(Tensor& tensor, int64_t index, float value, uint32_t bits) {
    uint32_t float_bits;
    std::memcpy(&float_bits, &value, sizeof value);
    switch (tensor.type) {
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
        tensor.as<float>()[index] = value;
        return;
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
        tensor.as<uint16_t>()[index] = static_cast<uint16_t>(float_bits >> 16);
        return;
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
        tensor.as<uint16_t>()[index] = static_cast<uint16_t>(bits);
        return;
      default:
        tensor.as<int8_t>()[index] = static_cast<int8_t>(bits);
    }
  }

  const uint8_t* data_;
  size_t left_;
  std::minstd_rand random_;
};

inline std::unique_ptr<Tensor> ints(const std::vector<int32_t>& values, Shape shape) {
  auto made = std::make_unique<Tensor>(Tensor::of(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, std::move(shape)));
  std::copy(values.begin(), values.end(), made->as<int32_t>());
  return made;
}

inline std::unique_ptr<Tensor> boolean(bool value) {
  auto made = std::make_unique<Tensor>(Tensor::of(ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, {}));
  *made->as<bool>() = value;
  return made;
}

inline std::unique_ptr<Tensor> filled(Decoder& decoder, Type type, Shape shape) {
  auto made = std::make_unique<Tensor>(Tensor::of(type, std::move(shape)));
  decoder.fill(*made);
  return made;
}

// Returns a tensor with the columns of head_params that a normalizer needs, sometimes with sinks; null without columns.
inline std::unique_ptr<Tensor> head_params(Decoder& decoder, const Call& call, int64_t q_heads) {
  const auto* name = std::get_if<std::string>(&call.attributes.at("normalizer"));
  const std::string normalizer = name == nullptr ? "" : *name;
  const bool two = normalizer == "ssa" || normalizer == "sigmoid";
  const int64_t own = two ? 2 : normalizer == "relu" || normalizer == "relu2" ? 1 : 0;
  const int64_t width = own + (decoder.one_in(3) ? 1 : 0);
  if (width == 0) return nullptr;
  auto made = std::make_unique<Tensor>(Tensor::of(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {q_heads, width}));
  for (int64_t index = 0; index < q_heads * width; ++index)
    made->as<float>()[index] = decoder.one_in(16) ? decoder.any_float() : static_cast<float>(index % 3 + 1) / 2;
  return made;
}

// Returns one of the ops with a name, each of which has other types.
inline const OrtCustomOp& op_named(const std::string& name, Decoder& decoder) {
  std::vector<const OrtCustomOp*> found;
  for (const OrtCustomOp* op : ops())
    if (name == op->GetName(op)) found.push_back(op);
  return *found[decoder.number(0, static_cast<int64_t>(found.size()) - 1)];
}

}  // namespace sharp::fuzz
