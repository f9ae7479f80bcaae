// Where the plugin's errors go: TensorRT's methods return a number only.
#pragma once

#include <NvInferRuntime.h>

namespace sharp::tensorrt {

// The finder of the logger that belongs to the engine in use; without one, messages go to stderr.
void set_logger_finder(nvinfer1::ILoggerFinder* finder);

void log_error(const char* message);

}  // namespace sharp::tensorrt
