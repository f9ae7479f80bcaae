// The services of ONNX Runtime that every op uses: memory of outputs, and threads.
#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "inputs.h"

namespace sharp::ort {

// Returns the memory of the output number `index`, allocated in this shape, or null if the node leaves the output out
// or it has no elements.
inline void* output_of(const Ort::KernelContext& context, size_t index, const std::vector<int64_t>& shape) {
  if (index >= context.GetOutputCount()) return nullptr;
  Ort::UnownedValue value = context.GetOutput(index, shape);
  return static_cast<OrtValue*>(value) == nullptr ? nullptr : value.GetTensorMutableRawData();
}

// Returns a status with the op's name and the error's message: INVALID_ARGUMENT for InputError, otherwise
// RUNTIME_EXCEPTION.
inline OrtStatus* status_of(const char* op, const std::exception& error) {
  const OrtErrorCode code =
      dynamic_cast<const InputError*>(&error) != nullptr ? ORT_INVALID_ARGUMENT : ORT_RUNTIME_EXCEPTION;
  return Ort::GetApi().CreateStatus(code, (std::string(op) + ": " + error.what()).c_str());
}

// Calls `body` for 0 ... count - 1 on the threads of ONNX Runtime, and returns when all are done. An exception must not
// leave a thread of the pool, so the first exception is kept and rethrown here.
inline void parallel_for(const Ort::KernelContext& context, int64_t count, const std::function<void(int64_t)>& body) {
  if (count == 1) return body(0);
  struct Shared {
    const std::function<void(int64_t)>& body;
    std::mutex mutex;
    std::exception_ptr error;
  } shared{body, {}, nullptr};
  const auto run = [](void* data, size_t index) {
    Shared& shared = *static_cast<Shared*>(data);
    try {
      shared.body(static_cast<int64_t>(index));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(shared.mutex);
      if (shared.error == nullptr) shared.error = std::current_exception();
    }
  };
  if (count > 0) context.ParallelFor(run, static_cast<size_t>(count), 0, &shared);
  if (shared.error != nullptr) std::rethrow_exception(shared.error);
}

}  // namespace sharp::ort
