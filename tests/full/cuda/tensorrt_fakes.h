// Stand-ins for the parts of TensorRT that a plugin library sees: a registry, an expression builder, a logger and the
// fields of a node. With them the drivers in this folder call libsharp_trt.so as TensorRT does, and print the results.
#pragma once

#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cctype>
#include <cstdio>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

using namespace nvinfer1;

// An expression that holds its text; the text of a constant is its number.
class Expression : public IDimensionExpr, apiv::VDimensionExpr {
 public:
  explicit Expression(std::string text) : text(std::move(text)) { mImpl = this; }
  ~Expression() noexcept override = default;
  bool isConstant() const override { return std::isdigit(text[0]) && text.find('+') == std::string::npos; }
  int64_t getConstantValue() const override { return std::stoll(text); }
  bool isSizeTensor() const override { return false; }
  const std::string text;
};

class Builder : public IExprBuilder, apiv::VExprBuilder {
 public:
  Builder() { mImpl = this; }
  ~Builder() noexcept override = default;
  const IDimensionExpr* make(const std::string& text) { return &made_.emplace_back(text); }
  const IDimensionExpr* constant(int64_t value) override { return make(std::to_string(value)); }
  const IDimensionExpr* operation(DimensionOperation kind, const IDimensionExpr& first,
                                  const IDimensionExpr& second) override {
    const auto text = [](const IDimensionExpr& one) { return static_cast<const Expression&>(one).text; };
    return make(kind == DimensionOperation::kSUM ? text(first) + "+" + text(second) : "operation");
  }
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&, const IDimensionExpr&) override {
    return make("size");
  }

 private:
  std::deque<Expression> made_;
};

class Logger : public ILogger, public ILoggerFinder {
 public:
  void log(Severity severity, const char* message) noexcept override {
    std::printf("log %d %s\n", static_cast<int>(severity), message);
  }
  ILogger* findLogger() override { return this; }
};

// The fields of a node, as the parser of ONNX models passes them.
struct Fields {
  std::vector<PluginField> fields;
  std::string normalizer;
  float scale = 0.125f, alpha = 2.0f, threshold = 0.75f, softcap = 0;
  int32_t window = 4096, causal = 1, columns = 5;
  float coefficients[9] = {-0.5f, 0.25f, 1.5f};

  explicit Fields(const char* name, int32_t terms = 3) : normalizer(name) {
    fields = {{"normalizer", normalizer.c_str(), PluginFieldType::kCHAR, int32_t(normalizer.size() + 1)},
              {"scale", &scale, PluginFieldType::kFLOAT32, 1},
              {"alpha", &alpha, PluginFieldType::kFLOAT32, 1},
              {"temperature_coefficients", coefficients, PluginFieldType::kFLOAT32, terms},
              {"entropy_threshold", &threshold, PluginFieldType::kFLOAT32, 1},
              {"softcap", &softcap, PluginFieldType::kFLOAT32, 1},
              {"window", &window, PluginFieldType::kINT32, 1},
              {"causal", &causal, PluginFieldType::kINT32, 1},
              {"stats_columns", &columns, PluginFieldType::kINT32, 1}};
  }
  PluginFieldCollection collection() const { return {int32_t(fields.size()), fields.data()}; }
};

inline const char* name_of(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
      return "float32";
    case DataType::kHALF:
      return "float16";
    case DataType::kBF16:
      return "bfloat16";
    case DataType::kINT8:
      return "int8";
    case DataType::kFP8:
      return "fp8";
    case DataType::kINT32:
      return "int32";
    case DataType::kINT64:
      return "int64";
    case DataType::kBOOL:
      return "bool";
    default:
      return "other";
  }
}

inline Dims dims(std::initializer_list<int64_t> sizes) {
  Dims result{};
  for (int64_t size : sizes) result.d[result.nbDims++] = size;
  return result;
}

inline PluginTensorDesc tensor(DataType type, Dims shape) {
  PluginTensorDesc description{};
  description.dims = shape;
  description.type = type;
  description.format = TensorFormat::kLINEAR;
  return description;
}

inline std::vector<DynamicPluginTensorDesc> dynamic(const std::vector<PluginTensorDesc>& tensors) {
  std::vector<DynamicPluginTensorDesc> result;
  for (const PluginTensorDesc& description : tensors)
    result.push_back({description, description.dims, description.dims, description.dims});
  return result;
}

struct Plugin {
  std::unique_ptr<IPluginV3> plugin;
  IPluginV3OneCore* core;
  IPluginV3OneBuildV2* build;
  IPluginV3OneRuntime* runtime;

  explicit Plugin(IPluginV3* created) : plugin(created) {
    core = static_cast<IPluginV3OneCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
    build = static_cast<IPluginV3OneBuildV2*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
    runtime = static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  }
};

// Returns the plugin that an engine has after its build with the plugin `built`.
inline Plugin deserialized(IPluginCreatorV3One* creator, const Plugin& built) {
  return Plugin(
      creator->createPlugin(creator->getPluginName(), built.runtime->getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
}

// libsharp_trt.so, loaded as by TensorRT over the fake CUDA driver; the library's messages are printed.
class Library {
 public:
  explicit Library(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    events_ = reinterpret_cast<const char* (*)()>(dlsym(driver, "fake_events"));
    set_device_ = reinterpret_cast<void (*)(int, int)>(dlsym(driver, "fake_device"));
    set_logger_finder_ = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"));
    set_logger_finder_(&logger_);
    int32_t count = 0;
    IPluginCreatorInterface* const* creators =
        reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"))(count);
    for (int32_t index = 0; index < count; ++index) {
      auto* creator = static_cast<IPluginCreatorV3One*>(creators[index]);
      registry[std::string(creator->getPluginName()) + "/" + creator->getPluginVersion() + "/" +
               creator->getPluginNamespace()] = creator;
    }
  }

  // Replaces the device.
  void set_device(int capability, int multiprocessors) const { set_device_(capability, multiprocessors); }

  void forget_logger() const { set_logger_finder_(nullptr); }

  // Prints the calls of the driver since the last time, one per line after `title`.
  void print_events(const char* title) const {
    std::istringstream events(events_());
    for (std::string line; std::getline(events, line);) std::printf("%s event %s\n", title, line.c_str());
  }
  void forget_events() const { events_(); }

  std::map<std::string, IPluginCreatorV3One*> registry;  // by name/version/namespace

 private:
  const char* (*events_)();
  void (*set_device_)(int, int);
  void (*set_logger_finder_)(ILoggerFinder*);
  Logger logger_;
};
