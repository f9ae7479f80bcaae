#include "fake_runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base);

// The types behind the C API's opaque pointers.
struct OrtStatus {
  OrtErrorCode code;
  std::string message;
};
struct OrtCustomOpDomain {};
struct OrtTensorTypeAndShapeInfo {
  const sharp::fuzz::Tensor* tensor;
};

namespace sharp::fuzz {
namespace {

std::vector<const OrtCustomOp*>& registered() {
  static std::vector<const OrtCustomOp*> ops;
  return ops;
}

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "FINDING: %s\n", what.c_str());
  std::abort();
}

OrtStatus* status(OrtErrorCode code, const char* message) { return new OrtStatus{code, message}; }
OrtStatus* absent() { return status(ORT_FAIL, "no such attribute"); }

Call& call_of(const OrtKernelContext* context) {
  return *reinterpret_cast<Call*>(const_cast<OrtKernelContext*>(context));
}
const Tensor* tensor_of(const OrtValue* value) { return reinterpret_cast<const Tensor*>(value); }

template <typename T>
const T* attribute(const OrtKernelInfo* info, const char* name) {
  const Call& call = *reinterpret_cast<const Call*>(info);
  const auto found = call.attributes.find(name);
  return found == call.attributes.end() ? nullptr : std::get_if<T>(&found->second);
}

template <typename T>
OrtStatus* read_number(const OrtKernelInfo* info, const char* name, T* out) {
  const T* value = attribute<T>(info, name);
  if (value == nullptr) return absent();
  *out = *value;
  return nullptr;
}

template <typename T>
OrtStatus* read_numbers(const OrtKernelInfo* info, const char* name, T* out, size_t* size) {
  const std::vector<T>* values = attribute<std::vector<T>>(info, name);
  if (values == nullptr) return absent();
  if (out != nullptr) std::copy(values->begin(), values->end(), out);
  *size = values->size();
  return nullptr;
}

OrtStatus* ORT_API_CALL read_string(const OrtKernelInfo* info, const char* name, char* out, size_t* size) noexcept {
  const std::string* value = attribute<std::string>(info, name);
  if (value == nullptr) return absent();
  if (out != nullptr) std::memcpy(out, value->c_str(), value->size() + 1);
  *size = value->size() + 1;
  return nullptr;
}

OrtStatus* ORT_API_CALL give_output(OrtKernelContext* context, size_t index, const int64_t* dimensions, size_t rank,
                                    OrtValue** out) noexcept {
  Call& call = call_of(context);
  *out = nullptr;
  if (!call.has_output.at(index)) return nullptr;
  const Shape shape(dimensions, dimensions + rank);
  if (elements_of(shape) < 0) return status(ORT_RUNTIME_EXCEPTION, "no such shape");
  Tensor*& output = call.output_of.at(index);
  if (output == nullptr) {
    const int input = call.in_place.at(index);
    if (input >= 0 && call.inputs[input] != nullptr && call.inputs[input]->shape == shape) {
      output = call.inputs[input].get();
    } else {
      const Type type = call.outputs.at(index)->type;
      *call.outputs[index] = Tensor::of(type, shape);
      output = call.outputs[index].get();
    }
  }
  if (output->shape != shape) fail("an output is requested in two shapes");
  *out = reinterpret_cast<OrtValue*>(output);
  return nullptr;
}

const OrtApi* api() {
  static OrtApi api = [] {
    OrtApi made{};  // a call of a function that is not set here would crash at once
    made.CreateStatus = [](OrtErrorCode code, const char* message) noexcept { return status(code, message); };
    made.GetErrorCode = [](const OrtStatus* status) noexcept { return status->code; };
    made.GetErrorMessage = [](const OrtStatus* status) noexcept { return status->message.c_str(); };
    made.ReleaseStatus = [](OrtStatus* status) noexcept { delete status; };
    made.CreateCustomOpDomain = [](const char*, OrtCustomOpDomain** out) noexcept -> OrtStatus* {
      *out = new OrtCustomOpDomain;
      return nullptr;
    };
    made.ReleaseCustomOpDomain = [](OrtCustomOpDomain* domain) noexcept { delete domain; };
    made.CustomOpDomain_Add = [](OrtCustomOpDomain*, const OrtCustomOp* op) noexcept -> OrtStatus* {
      registered().push_back(op);
      return nullptr;
    };
    made.AddCustomOpDomain = [](OrtSessionOptions*, OrtCustomOpDomain*) noexcept -> OrtStatus* { return nullptr; };

    made.KernelInfoGetAttribute_float = [](const OrtKernelInfo* info, const char* name, float* out) noexcept {
      return read_number(info, name, out);
    };
    made.KernelInfoGetAttribute_int64 = [](const OrtKernelInfo* info, const char* name, int64_t* out) noexcept {
      return read_number(info, name, out);
    };
    made.KernelInfoGetAttribute_string = read_string;
    made.KernelInfoGetAttributeArray_float = [](const OrtKernelInfo* info, const char* name, float* out,
                                                size_t* size) noexcept { return read_numbers(info, name, out, size); };
    made.KernelInfoGetAttributeArray_int64 = [](const OrtKernelInfo* info, const char* name, int64_t* out,
                                                size_t* size) noexcept { return read_numbers(info, name, out, size); };

    made.KernelContext_GetInputCount = [](const OrtKernelContext* context, size_t* out) noexcept -> OrtStatus* {
      *out = call_of(context).inputs.size();
      return nullptr;
    };
    made.KernelContext_GetOutputCount = [](const OrtKernelContext* context, size_t* out) noexcept -> OrtStatus* {
      *out = call_of(context).has_output.size();
      return nullptr;
    };
    made.KernelContext_GetInput = [](const OrtKernelContext* context, size_t index,
                                     const OrtValue** out) noexcept -> OrtStatus* {
      *out = reinterpret_cast<const OrtValue*>(call_of(context).inputs.at(index).get());
      return nullptr;
    };
    made.KernelContext_GetOutput = give_output;
    // One thread, the last part first: a kernel may not rely on any order.
    made.KernelContext_ParallelFor = [](const OrtKernelContext*, void (*body)(void*, size_t), size_t total, size_t,
                                        void* data) noexcept -> OrtStatus* {
      while (total > 0) body(data, --total);
      return nullptr;
    };

    made.GetTensorTypeAndShape = [](const OrtValue* value, OrtTensorTypeAndShapeInfo** out) noexcept -> OrtStatus* {
      *out = new OrtTensorTypeAndShapeInfo{tensor_of(value)};
      return nullptr;
    };
    made.ReleaseTensorTypeAndShapeInfo = [](OrtTensorTypeAndShapeInfo* info) noexcept { delete info; };
    made.GetTensorElementType = [](const OrtTensorTypeAndShapeInfo* info, Type* out) noexcept -> OrtStatus* {
      *out = info->tensor->type;
      return nullptr;
    };
    made.GetTensorShapeElementCount = [](const OrtTensorTypeAndShapeInfo* info, size_t* out) noexcept -> OrtStatus* {
      *out = static_cast<size_t>(info->tensor->elements());
      return nullptr;
    };
    made.GetDimensionsCount = [](const OrtTensorTypeAndShapeInfo* info, size_t* out) noexcept -> OrtStatus* {
      *out = info->tensor->shape.size();
      return nullptr;
    };
    made.GetDimensions = [](const OrtTensorTypeAndShapeInfo* info, int64_t* out, size_t rank) noexcept -> OrtStatus* {
      std::copy_n(info->tensor->shape.begin(), rank, out);
      return nullptr;
    };
    made.GetTensorMutableData = [](OrtValue* value, void** out) noexcept -> OrtStatus* {
      *out = tensor_of(value)->data;
      return nullptr;
    };
    return made;
  }();
  return &api;
}

// Returns whether there is no error. An error that is not a sentence for a user is a finding.
bool succeeded(OrtStatus* error) {
  if (error == nullptr) return true;
  const std::unique_ptr<OrtStatus> owned(error);
  if (error->message.empty() || error->message.find('\n') != std::string::npos || error->message.size() > 1000)
    fail("an error that is no sentence: " + error->message);
  return false;
}

}  // namespace

int64_t bytes_of(Type type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return 4;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return 2;
    default:
      return 1;
  }
}

int64_t elements_of(const Shape& shape) {
  int64_t elements = 1;
  for (const int64_t dimension : shape)
    if (dimension == 0) return 0;
  for (const int64_t dimension : shape)
    if (dimension < 0 || __builtin_mul_overflow(elements, dimension, &elements)) return -1;
  return elements;
}

Tensor Tensor::of(Type type, Shape shape) {
  Tensor made{type, std::move(shape), nullptr, nullptr};
  const int64_t shift = bytes_of(type) == 1 ? 4 : bytes_of(type);
  made.memory.reset(new char[made.bytes() + shift]);
  made.data = made.memory.get() + shift;
  return made;
}

const std::vector<const OrtCustomOp*>& ops() {
  static const std::vector<const OrtCustomOp*>& added = []() -> const std::vector<const OrtCustomOp*>& {
    static const OrtApiBase base = {[](uint32_t) noexcept { return api(); }, []() noexcept { return "fake"; }};
    if (OrtStatus* error = RegisterCustomOps(nullptr, &base)) fail(error->message);
    return registered();
  }();
  return added;
}

bool run(const OrtCustomOp& op, Call& call) {
  call.outputs.clear();
  for (size_t index = 0; index < call.has_output.size(); ++index)
    call.outputs.push_back(std::make_unique<Tensor>(Tensor{op.GetOutputType(&op, index), {}, nullptr, nullptr}));
  call.output_of.assign(call.has_output.size(), nullptr);
  void* kernel = nullptr;
  if (!succeeded(op.CreateKernelV2(&op, api(), reinterpret_cast<const OrtKernelInfo*>(&call), &kernel))) return false;
  const bool ran = succeeded(op.KernelComputeV2(kernel, reinterpret_cast<OrtKernelContext*>(&call)));
  op.KernelDestroy(kernel);
  return ran;
}

}  // namespace sharp::fuzz
