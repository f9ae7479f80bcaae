// `ai.sharp::PagedAttention` as ONNX Runtime sees it, on every execution provider: names, types, what may be left out.
#pragma once

#include <memory>
#include <vector>

#include "converted.h"
#include "inputs.h"
#include "runtime.h"

namespace sharp::ort {

constexpr ONNXTensorElementDataType kInt8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;

// T: query, key, value and output; C: the caches.
struct ElementTypes {
  ONNXTensorElementDataType compute, cache;

  cpu::CacheType cache_type() const {
    if (cache == kFloat16) return cpu::CacheType::kFloat16;
    if (cache == kBfloat16) return cpu::CacheType::kBfloat16;
    return cache == kInt8 ? cpu::CacheType::kInt8 : cpu::CacheType::kFloat32;
  }
};

// A Kernel has the members `attributes` and `types`, which are set here, and computes.
template <typename Op, typename Kernel>
struct PagedAttentionSchema : Ort::CustomOpBase<Op, Kernel, true> {
  explicit PagedAttentionSchema(ElementTypes element_types) : types(element_types) {
    OrtCustomOp::version = kApiVersion;
    // A cache that is an intermediate value and not needed again may be updated in place too.
    OrtCustomOp::GetMayInplace = [](int** inputs, int** outputs) -> size_t {
      *inputs = new int[4]{kKeyCache, kValueCache, kKeyScale, kValueScale};
      *outputs = new int[4]{kKeyCacheOut, kValueCacheOut, kKeyScaleOut, kValueScaleOut};
      return 4;
    };
    OrtCustomOp::ReleaseMayInplace = [](int* inputs, int* outputs) {
      delete[] inputs;
      delete[] outputs;
    };
  }

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    try {
      auto created = std::make_unique<Kernel>();
      read_attributes(Ort::ConstKernelInfo(info), created->attributes);
      created->types = types;
      *kernel = created.release();
    } catch (const std::exception& error) {
      return status_of("PagedAttention", error);
    }
    return nullptr;
  }

  const char* GetName() const { return "PagedAttention"; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return kOutputCount; }

  ONNXTensorElementDataType GetInputType(size_t index) const {
    if (index == kCollectStats) return ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
    if (index >= kSlotMapping && index <= kContextLens) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    if (index == kKeyCache || index == kValueCache) return types.cache;
    return index <= kValue ? types.compute : kFloat32;
  }
  ONNXTensorElementDataType GetOutputType(size_t index) const {
    if (index == kKeyCacheOut || index == kValueCacheOut) return types.cache;
    return index == kOutput ? types.compute : kFloat32;
  }

  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index >= kHeadParams ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t index) const {
    return index >= kKeyScaleOut ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }

  ElementTypes types;
};

// The op for CUDAExecutionProvider, for every pair of types that its kernels may have; none where libsharp_cuda.so does
// not lie beside this library.
std::vector<const OrtCustomOp*> cuda_paged_attention_ops();

}  // namespace sharp::ort
