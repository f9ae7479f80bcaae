// Does with libsharp_trt.so what TensorRT does with a plugin library, with a registry, an expression builder and a CUDA
// driver that are fakes, and prints what it sees: `tensorrt_driver LIBRARY`.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

// An expression is its own text.
class Expression : public IDimensionExpr, apiv::VDimensionExpr {
 public:
  explicit Expression(std::string text) : text(std::move(text)) { mImpl = this; }
  ~Expression() noexcept override = default;
  bool isConstant() const override { return false; }
  int64_t getConstantValue() const override { return 0; }
  bool isSizeTensor() const override { return false; }
  const std::string text;
};

class Builder : public IExprBuilder, apiv::VExprBuilder {
 public:
  Builder() { mImpl = this; }
  ~Builder() noexcept override = default;
  const IDimensionExpr* make(const std::string& text) { return &made_.emplace_back(text); }
  const IDimensionExpr* constant(int64_t value) override { return make(std::to_string(value)); }
  const IDimensionExpr* operation(DimensionOperation, const IDimensionExpr&, const IDimensionExpr&) override {
    return make("operation");
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

// Fields as the parser of ONNX models gives them.
struct Fields {
  std::vector<PluginField> fields;
  std::string normalizer;
  float scale = 0.125f, alpha = 2.0f, threshold = 0.75f, softcap = 0;
  int32_t window = 4096, causal = 1;
  float coefficients[9] = {-0.5f, 0.25f, 1.5f};

  explicit Fields(const char* name, int32_t terms = 3) : normalizer(name) {
    fields = {{"normalizer", normalizer.c_str(), PluginFieldType::kCHAR, int32_t(normalizer.size() + 1)},
              {"scale", &scale, PluginFieldType::kFLOAT32, 1},
              {"alpha", &alpha, PluginFieldType::kFLOAT32, 1},
              {"temperature_coefficients", coefficients, PluginFieldType::kFLOAT32, terms},
              {"entropy_threshold", &threshold, PluginFieldType::kFLOAT32, 1},
              {"softcap", &softcap, PluginFieldType::kFLOAT32, 1},
              {"window", &window, PluginFieldType::kINT32, 1},
              {"causal", &causal, PluginFieldType::kINT32, 1}};
  }
  PluginFieldCollection collection() const { return {int32_t(fields.size()), fields.data()}; }
};

const char* name_of(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
      return "float32";
    case DataType::kHALF:
      return "float16";
    case DataType::kBF16:
      return "bfloat16";
    case DataType::kINT8:
      return "int8";
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

Dims dims(std::initializer_list<int64_t> sizes) {
  Dims result{};
  for (int64_t size : sizes) result.d[result.nbDims++] = size;
  return result;
}

PluginTensorDesc tensor(DataType type, Dims shape) {
  PluginTensorDesc description{};
  description.dims = shape;
  description.type = type;
  description.format = TensorFormat::kLINEAR;
  return description;
}

// The inputs of a step: 5 tokens of 2 sequences, 8 query heads, 2 KV heads, head_dim 64, 100 blocks of 16.
std::vector<PluginTensorDesc> step(DataType type = DataType::kHALF, int64_t head_params = 0, int64_t slopes = 0) {
  return {tensor(type, dims({5, 8, 64})),
          tensor(type, dims({5, 2, 64})),
          tensor(type, dims({5, 2, 64})),
          tensor(type, dims({100, 2, 64, 16})),
          tensor(type, dims({100, 2, 16, 64})),
          tensor(DataType::kINT32, dims({5})),
          tensor(DataType::kINT32, dims({2, 20})),
          tensor(DataType::kINT32, dims({3})),
          tensor(DataType::kINT32, dims({2})),
          tensor(DataType::kFLOAT, head_params ? dims({8, head_params}) : dims({0})),
          tensor(DataType::kFLOAT, dims({slopes})),
          tensor(DataType::kBOOL, dims({}))};
}

std::vector<DynamicPluginTensorDesc> dynamic(const std::vector<PluginTensorDesc>& tensors) {
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

// Asks position by position, as TensorRT does, and prints the pairs of types that are taken with `count` inputs.
void sweep(const Plugin& plugin, int32_t count) {
  for (const DataType type : {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT8, DataType::kINT32})
    for (const DataType cache : {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT8}) {
      std::vector<PluginTensorDesc> tensors = step(type);
      tensors.resize(count);
      tensors[3].type = tensors[4].type = cache;
      if (count == 12 && type == DataType::kHALF) tensors[11].type = DataType::kINT32;
      for (const DataType output : {type, cache, cache, DataType::kFLOAT}) tensors.push_back(tensor(output, dims({})));
      const auto described = dynamic(tensors);
      bool taken = true;
      for (int32_t position = 0; taken && position < int32_t(described.size()); ++position)
        taken = plugin.build->supportsFormatCombination(position, described.data(), count, 4);
      if (taken) std::printf("sweep %d %s %s\n", count, name_of(type), name_of(cache));
    }
}

// Every position with one type or layout that does not fit.
void sweep_wrong(const Plugin& plugin) {
  std::vector<PluginTensorDesc> right = step();
  for (const DataType output : {DataType::kHALF, DataType::kHALF, DataType::kHALF, DataType::kFLOAT})
    right.push_back(tensor(output, dims({})));
  for (size_t position = 0; position < right.size(); ++position)
    for (int wrong = 0; wrong < 2; ++wrong) {
      auto described = dynamic(right);
      if (wrong == 0) described[position].desc.type = DataType::kINT64;
      if (wrong == 1) described[position].desc.format = TensorFormat::kCHW32;
      if (plugin.build->supportsFormatCombination(int32_t(position), described.data(), 12, 4))
        std::printf("wrong taken at %zu\n", position);
    }
}

void shapes(const Plugin& plugin) {
  Builder builder;
  const char* names[12][4] = {{"tokens", "q_heads", "head_dim"},
                              {"tokens", "kv_heads", "head_dim"},
                              {"tokens", "kv_heads", "value_dim"},
                              {"blocks", "kv_heads", "head_dim", "block_size"},
                              {"blocks", "kv_heads", "block_size", "value_dim"},
                              {"tokens"},
                              {"sequences", "max_blocks"},
                              {"ends"},
                              {"sequences"},
                              {"q_heads", "parameters"},
                              {"q_heads"},
                              {}};
  DimsExprs inputs[12]{}, outputs[4]{};
  for (int32_t input = 0; input < 12; ++input)
    for (const char* name : names[input])
      if (name != nullptr) inputs[input].d[inputs[input].nbDims++] = builder.make(name);
  std::printf("shapes status %d\n", plugin.build->getOutputShapes(inputs, 12, nullptr, 0, outputs, 4, builder));
  DataType types[4];
  const DataType given[12] = {DataType::kFLOAT, DataType::kFLOAT, DataType::kFLOAT, DataType::kBF16, DataType::kBF16};
  std::printf("types status %d\n", plugin.build->getOutputDataTypes(types, 4, given, 12));
  for (int32_t output = 0; output < 4; ++output) {
    std::printf("output %d %s", output, name_of(types[output]));
    for (int32_t index = 0; index < outputs[output].nbDims; ++index)
      std::printf(" %s", static_cast<const Expression*>(outputs[output].d[index])->text.c_str());
    std::printf(" aliases %d\n", plugin.build->getAliasedInput(output));
  }
}

// Runs a step through an attached clone; a buffer's address is its number * 4096.
void enqueue(const char* title, const Plugin& built, const std::vector<PluginTensorDesc>& inputs, bool aliased,
             const char* (*events)()) {
  const Plugin plugin(built.runtime->attachToContext(nullptr));
  const std::vector<PluginTensorDesc> outputs = {tensor(inputs[0].type, dims({5, 8, 64})), inputs[3], inputs[4],
                                                 tensor(DataType::kFLOAT, dims({5, 8, 4}))};
  const int32_t count = int32_t(inputs.size());
  std::printf("%s shape %d\n", title, plugin.runtime->onShapeChange(inputs.data(), count, outputs.data(), 4));
  events();  // loading is another test's
  std::vector<const void*> from;
  for (int32_t input = 0; input < count; ++input) from.push_back(reinterpret_cast<void*>(4096L * (input + 1)));
  std::vector<void*> to;
  for (int32_t output = 0; output < 4; ++output) to.push_back(reinterpret_cast<void*>(4096L * (output + 101)));
  if (aliased) {
    to[1] = const_cast<void*>(from[3]);
    to[2] = const_cast<void*>(from[4]);
  }
  void* workspace = reinterpret_cast<void*>(1L << 30);
  const int32_t status = plugin.runtime->enqueue(inputs.data(), outputs.data(), from.data(), to.data(), workspace,
                                                 reinterpret_cast<cudaStream_t>(55));
  std::printf("%s enqueue %d\n", title, status);
  std::string line;
  for (const char* text = events(); *text; ++text)
    if (*text == '\n') {
      std::printf("%s event %s\n", title, line.c_str());
      line.clear();
    } else {
      line += *text;
    }
}

}  // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::printf("%s\n", dlerror()), 1;
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  const auto events = reinterpret_cast<const char* (*)()>(dlsym(driver, "fake_events"));
  const auto get_creators =
      reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
  const auto set_logger_finder = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"));
  Logger logger;
  set_logger_finder(&logger);

  int32_t count = 0;
  IPluginCreatorInterface* const* creators = get_creators(count);
  // A registry: creators by name, version and namespace.
  std::map<std::string, IPluginCreatorV3One*> registry;
  for (int32_t index = 0; index < count; ++index) {
    const InterfaceInfo info = creators[index]->getInterfaceInfo();
    auto* creator = static_cast<IPluginCreatorV3One*>(creators[index]);
    std::printf("creator %s %d.%d\n", info.kind, info.major, info.minor);
    registry[std::string(creator->getPluginName()) + "/" + creator->getPluginVersion() + "/" +
             creator->getPluginNamespace()] = creator;
  }
  IPluginCreatorV3One* creator = registry.at("PagedAttention/1/");
  const PluginFieldCollection* names = creator->getFieldNames();
  for (int32_t index = 0; index < names->nbFields; ++index)
    std::printf("field %s %d\n", names->fields[index].name, static_cast<int>(names->fields[index].type));
  const auto create = [&](const Fields& fields, TensorRTPhase phase = TensorRTPhase::kBUILD) {
    const PluginFieldCollection collection = fields.collection();
    return creator->createPlugin("PagedAttention", &collection, phase);
  };

  Fields fields("adaptive_softmax");
  Plugin plugin(create(fields));
  for (const InterfaceInfo info :
       {plugin.core->getInterfaceInfo(), plugin.build->getInterfaceInfo(), plugin.runtime->getInterfaceInfo()})
    std::printf("capability %s %d.%d\n", info.kind, info.major, info.minor);
  std::printf("plugin %s %s '%s' outputs %d\n", plugin.core->getPluginName(), plugin.core->getPluginVersion(),
              plugin.core->getPluginNamespace(), plugin.build->getNbOutputs());
  std::printf("built %s\n", plugin.build->getMetadataString());
  const Plugin copy(plugin.plugin->clone());
  std::printf("cloned %s\n", copy.build->getTimingCacheID());
  const Plugin read(
      creator->createPlugin("PagedAttention", copy.runtime->getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
  std::printf("deserialized %s\n", read.build->getTimingCacheID());
  fields.alpha = 2.0000002f;
  std::printf("other %s\n", Plugin(create(fields)).build->getTimingCacheID());

  sweep(plugin, 12);
  sweep(plugin, 9);
  sweep_wrong(plugin);
  shapes(plugin);

  const auto inputs = step();
  const auto described = dynamic(inputs);
  std::printf("configure %d\n", plugin.build->configurePlugin(described.data(), 12, nullptr, 0));
  std::printf("workspace %zu\n", plugin.build->getWorkspaceSize(described.data(), 12, nullptr, 0));
  enqueue("aliased", plugin, inputs, true, events);
  enqueue("copied", plugin, inputs, false, events);
  enqueue("given", plugin, step(DataType::kHALF, 2, 8), true, events);
  enqueue("short", plugin, {inputs.begin(), inputs.begin() + 9}, true, events);

  Fields other("softmax", 0);
  other.fields.resize(2);
  Plugin smallest(create(other));
  std::printf("defaults %s\n", smallest.build->getMetadataString());
  for (const char* wrong : {"heads", "ranks", "blocks", "few"}) {
    auto bad = dynamic(step());
    if (!std::strcmp(wrong, "heads")) bad[0].desc.dims.d[1] = 7;
    if (!std::strcmp(wrong, "ranks")) bad[3].desc.dims.nbDims = 3;
    if (!std::strcmp(wrong, "blocks")) bad[4].desc.dims.d[2] = 8;
    std::printf("refused %s %d\n", wrong,
                plugin.build->configurePlugin(bad.data(), wrong[0] == 'f' ? 5 : 12, nullptr, 0));
  }
  Fields unknown("softmin"), endless("entmax"), many("softmax", 9), none("softmax");
  endless.alpha = 1.0f;
  none.fields.erase(none.fields.begin() + 1);
  for (const Fields* wrong : {&unknown, &endless, &many, &none}) std::printf("created %d\n", create(*wrong) != nullptr);
  set_logger_finder(nullptr);
  std::printf("created %d\n", creator->createPlugin("PagedAttention", nullptr, TensorRTPhase::kBUILD) != nullptr);
  return 0;
}
