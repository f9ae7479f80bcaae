// The log of the plugin's errors, because TensorRT's methods return only a number.
#pragma once

#include <NvInferRuntime.h>

namespace sharp::tensorrt {

// Sets the finder of the engine's logger; without a finder messages go to stderr.
void set_logger_finder(nvinfer1::ILoggerFinder* finder);

void log_error(const char* message);

}  // namespace sharp::tensorrt
