// The functions that TensorRT calls to load the library (IPluginRegistry::loadLibrary, trtexec --dynamicPlugins).
#include <atomic>
#include <cstdio>

#include "attention_plugin.h"
#include "log.h"
#include "paged_attention_plugin.h"

namespace sharp::tensorrt {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

class Creator : public nvinfer1::IPluginCreatorV3One {
 public:
  using Make = nvinfer1::IPluginV3* (*)(const SharpAttributes&, nvinfer1::TensorRTPhase, SharpDevice);
  Creator(const char* name, const char* version, Make make) : name_(name), version_(version), make_(make) {}

  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override {
    try {
      if (fields == nullptr) throw InputError("there are no attributes");
      return make_(read_fields(*fields), phase, read_device(*fields));
    } catch (const std::exception& error) {
      // TensorRT's parser passes the node's name.
      log_error((std::string(name == nullptr ? getPluginName() : name) + ": " + error.what()).c_str());
      return nullptr;
    }
  }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return field_names(); }
  const char* getPluginName() const noexcept override { return name_; }
  const char* getPluginVersion() const noexcept override { return version_; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  const char *name_, *version_;
  Make make_;
};

template <Beside kBeside>
nvinfer1::IPluginV3* make_paged(const SharpAttributes& attributes, nvinfer1::TensorRTPhase phase, SharpDevice device) {
  return new PagedAttentionPlugin(kBeside, attributes, phase, device);
}

nvinfer1::IPluginV3* make_contiguous(const SharpAttributes& attributes, nvinfer1::TensorRTPhase phase,
                                     SharpDevice device) {
  return new AttentionPlugin(attributes, phase, device);
}

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
  using namespace sharp::tensorrt;
  using Paged = PagedAttentionPlugin;
  static Creator paged(Paged::kName, Paged::kVersions[0], make_paged<Beside::kNothing>);
  static Creator scaled(Paged::kName, Paged::kVersions[1], make_paged<Beside::kScales>);
  static Creator screened(Paged::kName, Paged::kVersions[2], make_paged<Beside::kScreen>);
  static Creator contiguous(AttentionPlugin::kName, AttentionPlugin::kVersion, make_contiguous);
  // Older engines were built when the plugin had the name of ONNX's op.
  static Creator old("Attention", AttentionPlugin::kVersion, make_contiguous);
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&paged, &scaled, &screened, &contiguous, &old};
  count = 5;
  return creators;
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  sharp::tensorrt::set_logger_finder(finder);
}
