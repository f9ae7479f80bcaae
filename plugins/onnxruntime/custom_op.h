// The adapter between our ops and ONNX Runtime's custom-op API, for every op and provider.
#pragma once

#include <memory>
#include <vector>

#include "element_types.h"
#include "inputs.h"
#include "runtime.h"

namespace sharp::ort {

// A kernel as ONNX Runtime calls it. An exception of `compute` becomes a status that names the op.
template <typename Op, typename Kernel>
struct ReportingKernel : Kernel {
  OrtStatusPtr ComputeV2(OrtKernelContext* context) const {
    try {
      Kernel::compute(Ort::KernelContext(context));
    } catch (const std::exception& error) {
      return status_of(Op::kName, error);
    }
    return nullptr;
  }
};

// An op for one pair of types. `Tables` are the op's tables in sharp_op.h. A Kernel has the members `attributes` and
// `types`, which are set here, and `compute`. `Op` may define another name.
template <typename Op, typename Kernel, typename Tables>
struct CustomOp : Ort::CustomOpBase<Op, ReportingKernel<Op, Kernel>, true> {
  explicit CustomOp(ElementTypes element_types) : types(element_types) {
    OrtCustomOp::version = kApiVersion;
    // ONNX Runtime may update a cache in place, even if it is not bound, when it is an intermediate value used only
    // here.
    OrtCustomOp::GetMayInplace = [](int** inputs, int** outputs) -> size_t {
      *inputs = new int[Tables::kOutputCount];
      *outputs = new int[Tables::kOutputCount];
      size_t count = 0;
      for (int output = 0; output < Tables::kOutputCount; ++output)
        if (Tables::kOutputs[output].in_place >= 0) {
          (*inputs)[count] = Tables::kOutputs[output].in_place;
          (*outputs)[count++] = output;
        }
      return count;
    };
    OrtCustomOp::ReleaseMayInplace = [](int* inputs, int* outputs) {
      delete[] inputs;
      delete[] outputs;
    };
  }

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    try {
      auto created = std::make_unique<ReportingKernel<Op, Kernel>>();
      created->attributes = read_attributes(Ort::ConstKernelInfo(info));
      created->types = types;
      *kernel = created.release();
    } catch (const std::exception& error) {
      return status_of(Op::kName, error);
    }
    return nullptr;
  }

  static constexpr const char* kName = Tables::kName;
  const char* GetName() const { return Op::kName; }

  size_t GetInputTypeCount() const { return Tables::kInputCount; }
  size_t GetOutputTypeCount() const { return Tables::kOutputCount; }
  ONNXTensorElementDataType GetInputType(size_t index) const { return types.of(Tables::kInputs[index].type); }
  ONNXTensorElementDataType GetOutputType(size_t index) const { return types.of(Tables::kOutputs[index].type); }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return Tables::kInputs[index].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t index) const {
    return Tables::kOutputs[index].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }

  ElementTypes types;
};

// Returns the op for all of these pairs of types. ONNX Runtime selects an op by its schema and then fails if no kernel
// has the model's types, so all pairs of the op must be given.
template <typename Op>
std::vector<const OrtCustomOp*> ops_of(std::initializer_list<ElementTypes> pairs) {
  // The ops are never freed: ONNX Runtime keeps their addresses, and a session may be closed after the end of main.
  static const auto& ops = *new std::vector<Op>(pairs.begin(), pairs.end());
  std::vector<const OrtCustomOp*> found;
  for (const Op& op : ops) found.push_back(&op);
  return found;
}

}  // namespace sharp::ort
