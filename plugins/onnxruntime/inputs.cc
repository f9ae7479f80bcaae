#include "inputs.h"

namespace sharp::ort {

NodeInputs::NodeInputs(const Ort::KernelContext& context, const ParameterDefinition* inputs, size_t count)
    : shapes(count), data(count, nullptr) {
  for (size_t input = 0; input < std::min(count, context.GetInputCount()); ++input) {
    const Ort::ConstValue value = context.GetInput(input);
    if (static_cast<const OrtValue*>(value) == nullptr) continue;
    shapes[input] = {true, value.GetTensorTypeAndShapeInfo().GetShape()};
    if (is_there(inputs[input], shapes[input])) data[input] = value.GetTensorRawData();
  }
}

}  // namespace sharp::ort
