// What every op of ours is to ONNX Runtime, whatever it computes and wherever it runs.
#pragma once

#include <iterator>
#include <memory>
#include <vector>

#include "element_types.h"
#include "inputs.h"
#include "runtime.h"

namespace sharp::ort {

// An output that may take an input's memory.
struct InPlace {
  int input, output;
};

// A kernel as ONNX Runtime calls it: what `compute` throws becomes a status that names the op.
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

// An op for one pair of types. A Kernel has the members `attributes` and `types`, which are set here, and `compute`.
template <typename Op, typename Kernel>
struct CustomOp : Ort::CustomOpBase<Op, ReportingKernel<Op, Kernel>, true> {
  explicit CustomOp(ElementTypes element_types) : types(element_types) {
    OrtCustomOp::version = kApiVersion;
    // A cache that is an intermediate value and not needed again may be updated in place without being bound.
    OrtCustomOp::GetMayInplace = [](int** inputs, int** outputs) -> size_t {
      constexpr size_t count = std::size(Op::kInPlace);
      *inputs = new int[count];
      *outputs = new int[count];
      for (size_t index = 0; index < count; ++index) {
        (*inputs)[index] = Op::kInPlace[index].input;
        (*outputs)[index] = Op::kInPlace[index].output;
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
      read_attributes(Ort::ConstKernelInfo(info), created->attributes);
      created->types = types;
      *kernel = created.release();
    } catch (const std::exception& error) {
      return status_of(Op::kName, error);
    }
    return nullptr;
  }

  const char* GetName() const { return Op::kName; }

  ElementTypes types;
};

// The op for all of these pairs of types. ONNX Runtime takes an op by its schema and then fails if no kernel has the
// model's types: all that the op has must be here.
template <typename Op>
std::vector<const OrtCustomOp*> ops_of(std::initializer_list<ElementTypes> pairs) {
  // Never freed: ONNX Runtime keeps their addresses, and a session may be closed after the end of main.
  static const auto& ops = *new std::vector<Op>(pairs.begin(), pairs.end());
  std::vector<const OrtCustomOp*> found;
  for (const Op& op : ops) found.push_back(&op);
  return found;
}

}  // namespace sharp::ort
