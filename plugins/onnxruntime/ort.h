// ONNX Runtime's header-only C++ API, initialized explicitly, so that our version is requested and not the header's.
#pragma once

#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

namespace sharp::ort {

constexpr uint32_t kApiVersion = 21;  // supported by every runtime from 1.21 on, because the C API only grows

}
