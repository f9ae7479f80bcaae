// ONNX Runtime's header-only C++ API, initialized explicitly: the requested version is ours, not the header's.
#pragma once

#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

namespace sharp::ort {

constexpr uint32_t kApiVersion = 21;  // the C API only grows: every runtime from 1.21 serves it

}
