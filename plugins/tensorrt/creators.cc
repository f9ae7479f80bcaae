// What TensorRT calls when it loads the library (IPluginRegistry::loadLibrary, or --dynamicPlugins of trtexec).
#include <atomic>
#include <cstdio>

#include "attention_plugin.h"
#include "log.h"
#include "paged_attention_plugin.h"

namespace sharp::tensorrt {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

template <typename OpPlugin>
class Creator : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit Creator(const char* plugin_name = OpPlugin::kName) : name_(plugin_name) {}

  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override {
    try {
      if (fields == nullptr) throw InputError("there are no attributes");
      return new OpPlugin(read_fields(*fields), phase, read_device(*fields));
    } catch (const std::exception& error) {
      // TensorRT's parser gives the node's name.
      log_error((std::string(name == nullptr ? getPluginName() : name) + ": " + error.what()).c_str());
      return nullptr;
    }
  }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return field_names(); }
  const char* getPluginName() const noexcept override { return name_; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  const char* name_;
};

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) { logger_finder = finder; }

void log_error(const char* message) {
  nvinfer1::ILoggerFinder* finder = logger_finder;
  nvinfer1::ILogger* logger = finder == nullptr ? nullptr : finder->findLogger();
  if (logger != nullptr)
    logger->log(nvinfer1::ILogger::Severity::kERROR, message);
  else
    std::fprintf(stderr, "Sharp: %s\n", message);
}

}  // namespace sharp::tensorrt

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(
    int32_t& count) {
  static sharp::tensorrt::Creator<sharp::tensorrt::PagedAttentionPlugin> paged_attention;
  static sharp::tensorrt::Creator<sharp::tensorrt::AttentionPlugin> attention;
  // Of engines that were built when the plugin had the name of ONNX's op.
  static sharp::tensorrt::Creator<sharp::tensorrt::AttentionPlugin> old_attention("Attention");
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&paged_attention, &attention, &old_attention};
  count = 3;
  return creators;
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  sharp::tensorrt::set_logger_finder(finder);
}
