// Calls libsharp_trt.so and its plugin PagedAttention as TensorRT does: `tensorrt_driver LIBRARY`.
#include <cstring>

#include "tensorrt_fakes.h"

namespace {

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

// The inputs of a step over a cache of 8 bits, with its scales.
std::vector<PluginTensorDesc> scaled_step(DataType cache) {
  std::vector<PluginTensorDesc> tensors = step();
  tensors[3].type = tensors[4].type = cache;
  for (int scale = 0; scale < 2; ++scale) tensors.push_back(tensor(DataType::kFLOAT, dims({100, 2})));
  return tensors;
}

// The inputs of a step over a cache with a key screen.
std::vector<PluginTensorDesc> screened_step() {
  std::vector<PluginTensorDesc> tensors = step();
  for (int scale = 0; scale < 2; ++scale) tensors.push_back(tensor(DataType::kFLOAT, dims({0})));
  tensors.push_back(tensor(DataType::kINT8, dims({100, 2, 16 * (64 + 8)})));
  tensors.push_back(tensor(DataType::kFLOAT, dims({2, 64})));
  return tensors;
}

// Asks position by position, as TensorRT does, and prints the accepted pairs of types with `count` inputs.
void sweep(const Plugin& plugin, int32_t count) {
  const std::initializer_list<DataType> types = {DataType::kFLOAT, DataType::kHALF,  DataType::kBF16, DataType::kINT8,
                                                 DataType::kFP8,   DataType::kINT32, DataType::kUINT8};
  const int32_t outputs = plugin.build->getNbOutputs();
  for (const DataType type : types)
    for (const DataType cache : types) {
      std::vector<PluginTensorDesc> tensors = count > 12 ? scaled_step(cache) : step(type);
      tensors.resize(count);
      tensors[0].type = tensors[1].type = tensors[2].type = type;
      tensors[3].type = tensors[4].type = cache;
      if (count >= 12 && type == DataType::kHALF) tensors[11].type = DataType::kINT32;
      for (const DataType output : {type, cache, cache}) tensors.push_back(tensor(output, dims({})));
      tensors.resize(count + outputs, tensor(DataType::kFLOAT, dims({})));
      const auto described = dynamic(tensors);
      bool taken = true;
      for (int32_t position = 0; taken && position < int32_t(described.size()); ++position)
        taken = plugin.build->supportsFormatCombination(position, described.data(), count, outputs);
      if (taken) std::printf("sweep %d %s %s\n", count, name_of(type), name_of(cache));
    }
}

// Asks for every position of a step's tensors with a type and with a layout that does not fit, and prints those
// that are accepted.
void sweep_wrong(const Plugin& plugin, std::vector<PluginTensorDesc> right) {
  const int32_t inputs = int32_t(right.size()), outputs = plugin.build->getNbOutputs();
  for (const DataType output : {DataType::kHALF, right[3].type, right[3].type, DataType::kFLOAT})
    right.push_back(tensor(output, dims({})));
  right.resize(inputs + outputs, tensor(inputs > 14 ? DataType::kINT8 : DataType::kFLOAT, dims({})));
  std::printf("right %d", inputs);
  for (int32_t position = 0; position < inputs + outputs; ++position)
    if (!plugin.build->supportsFormatCombination(position, dynamic(right).data(), inputs, outputs))
      std::printf(" refused at %d", position);
  std::printf("\n");
  for (size_t position = 0; position < right.size(); ++position)
    for (int wrong = 0; wrong < 2; ++wrong) {
      auto described = dynamic(right);
      if (wrong == 0) described[position].desc.type = DataType::kINT64;
      if (wrong == 1) described[position].desc.format = TensorFormat::kCHW32;
      if (plugin.build->supportsFormatCombination(int32_t(position), described.data(), inputs, outputs))
        std::printf("wrong taken at %zu\n", position);
    }
}

void shapes(const Plugin& plugin, int32_t input_count, DataType cache) {
  Builder builder;
  const char* names[16][4] = {{"tokens", "q_heads", "head_dim"},
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
                              {},
                              {"blocks", "kv_heads"},
                              {"blocks", "kv_heads"},
                              {"blocks", "kv_heads", "bytes"},
                              {"kv_heads", "head_dim"}};
  const int32_t output_count = plugin.build->getNbOutputs();
  DimsExprs inputs[16]{}, outputs[6]{};
  for (int32_t input = 0; input < input_count; ++input)
    for (const char* name : names[input])
      if (name != nullptr) inputs[input].d[inputs[input].nbDims++] = builder.make(name);
  std::printf("shapes status %d\n",
              plugin.build->getOutputShapes(inputs, input_count, nullptr, 0, outputs, output_count, builder));
  DataType types[6];
  const DataType given[16] = {DataType::kFLOAT, DataType::kFLOAT, DataType::kFLOAT, cache, cache};
  std::printf("types status %d\n", plugin.build->getOutputDataTypes(types, output_count, given, input_count));
  for (int32_t output = 0; output < output_count; ++output) {
    std::printf("output %d %s", output, name_of(types[output]));
    for (int32_t index = 0; index < outputs[output].nbDims; ++index)
      std::printf(" %s", static_cast<const Expression*>(outputs[output].d[index])->text.c_str());
    std::printf(" aliases %d\n", plugin.build->getAliasedInput(output));
  }
}

// Runs a step through an attached clone; a buffer's address is its number * 4096.
void enqueue(const char* title, const Plugin& built, const std::vector<PluginTensorDesc>& inputs, bool aliased,
             const Library& library) {
  const Plugin plugin(built.runtime->attachToContext(nullptr));
  std::vector<PluginTensorDesc> outputs = {tensor(inputs[0].type, dims({5, 8, 64})), inputs[3], inputs[4],
                                           tensor(DataType::kFLOAT, dims({5, 8, 5}))};
  const int32_t count = int32_t(inputs.size());
  if (count > 14) outputs.push_back(inputs[14]);
  else if (count > 12) outputs.insert(outputs.end(), inputs.begin() + 12, inputs.end());
  const int32_t output_count = int32_t(outputs.size());
  std::printf("%s shape %d\n", title,
              plugin.runtime->onShapeChange(inputs.data(), count, outputs.data(), output_count));
  library.forget_events();  // the events of loading, which another test checks
  std::vector<const void*> from;
  for (int32_t input = 0; input < count; ++input) from.push_back(reinterpret_cast<void*>(4096L * (input + 1)));
  std::vector<void*> to;
  for (int32_t output = 0; output < output_count; ++output)
    to.push_back(reinterpret_cast<void*>(4096L * (output + 101)));
  for (int32_t output = 0; aliased && output < output_count; ++output)
    if (const int32_t input = plugin.build->getAliasedInput(output); input >= 0)
      to[output] = const_cast<void*>(from[input]);
  void* workspace = reinterpret_cast<void*>(1L << 30);
  const int32_t status = plugin.runtime->enqueue(inputs.data(), outputs.data(), from.data(), to.data(), workspace,
                                                 reinterpret_cast<cudaStream_t>(55));
  std::printf("%s enqueue %d\n", title, status);
  library.print_events(title);
}

}  // namespace

int main(int, char** arguments) {
  const Library library(arguments[1]);
  for (const auto& [name, creator] : library.registry) {
    const InterfaceInfo info = creator->getInterfaceInfo();
    std::printf("creator %s %s %d.%d\n", name.c_str(), info.kind, info.major, info.minor);
  }
  IPluginCreatorV3One* creator = library.registry.at("PagedAttention/1/");
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

  const auto create_version = [&](const char* version, const Fields& fields) {
    const PluginFieldCollection collection = fields.collection();
    return library.registry.at(version)->createPlugin("", &collection, TensorRTPhase::kBUILD);
  };
  const Plugin scaled(create_version("PagedAttention/2/", fields));
  const Fields sparse("entmax");
  const Plugin screened(create_version("PagedAttention/3/", sparse));
  for (const Plugin* other : {&scaled, &screened})
    std::printf("plugin %s %s '%s' outputs %d\n", other->core->getPluginName(), other->core->getPluginVersion(),
                other->core->getPluginNamespace(), other->build->getNbOutputs());

  sweep(plugin, 12);
  sweep(plugin, 9);
  sweep(plugin, 14);
  sweep(scaled, 14);
  sweep(scaled, 12);
  sweep_wrong(plugin, step());
  sweep_wrong(scaled, scaled_step(DataType::kINT8));
  sweep_wrong(scaled, scaled_step(DataType::kFP8));
  sweep_wrong(screened, screened_step());
  shapes(plugin, 12, DataType::kBF16);
  shapes(scaled, 14, DataType::kFP8);
  shapes(screened, 16, DataType::kBF16);

  const auto inputs = step();
  const auto described = dynamic(inputs);
  std::printf("configure %d\n", plugin.build->configurePlugin(described.data(), 12, nullptr, 0));
  std::printf("workspace %zu\n", plugin.build->getWorkspaceSize(described.data(), 12, nullptr, 0));
  enqueue("building", plugin, inputs, true, library);
  enqueue("building-copied", Plugin(plugin.plugin->clone()), inputs, false, library);
  const Plugin running = deserialized(creator, plugin);
  enqueue("aliased", running, inputs, true, library);
  enqueue("copied", running, inputs, false, library);
  enqueue("given", running, step(DataType::kHALF, 1, 8), true, library);
  enqueue("short", running, {inputs.begin(), inputs.begin() + 9}, true, library);
  auto longer = inputs;
  longer[6].dims = dims({4, 5000});
  longer[7].dims = dims({5});
  longer[8].dims = dims({4});
  enqueue("long", running, longer, true, library);
  library.set_device(90, 4);
  enqueue("smaller", running, longer, true, library);
  library.set_device(90, 160);
  enqueue("larger", running, longer, true, library);
  library.set_device(86, 132);
  std::printf("other-capability %d\n", running.runtime->onShapeChange(inputs.data(), 12, nullptr, 4));
  library.set_device(90, 132);
  for (const DataType cache : {DataType::kINT8, DataType::kFP8}) {
    const auto given = scaled_step(cache);
    const auto bounds = dynamic(given);
    const Plugin built(create_version("PagedAttention/2/", fields));
    std::printf("%s configure %d\n", name_of(cache), built.build->configurePlugin(bounds.data(), 14, nullptr, 0));
    enqueue((std::string(name_of(cache)) + "-building").c_str(), built, given, false, library);
    const Plugin read = deserialized(library.registry.at("PagedAttention/2/"), built);
    enqueue((std::string(name_of(cache)) + "-aliased").c_str(), read, given, true, library);
    enqueue((std::string(name_of(cache)) + "-copied").c_str(), read, given, false, library);
  }

  const auto given = screened_step();
  const auto bounds = dynamic(given);
  std::printf("screen configure %d\n", screened.build->configurePlugin(bounds.data(), 16, nullptr, 0));
  enqueue("screen-building", screened, given, false, library);
  const Plugin read_screened = deserialized(library.registry.at("PagedAttention/3/"), screened);
  enqueue("screen-aliased", read_screened, given, true, library);
  enqueue("screen-copied", read_screened, {given.begin(), given.begin() + 15}, false, library);

  Fields other("softmax", 0);
  other.fields.resize(2);
  Plugin smallest(create(other));
  std::printf("defaults %s\n", smallest.build->getMetadataString());
  for (const char* wrong : {"heads", "ranks", "blocks", "columns", "few"}) {
    auto bad = dynamic(step(DataType::kHALF, std::strcmp(wrong, "columns") ? 0 : 2));
    if (!std::strcmp(wrong, "heads")) bad[0].desc.dims.d[1] = 7;
    if (!std::strcmp(wrong, "ranks")) bad[3].desc.dims.nbDims = 3;
    if (!std::strcmp(wrong, "blocks")) bad[4].desc.dims.d[2] = 8;
    std::printf("refused %s %d\n", wrong,
                plugin.build->configurePlugin(bad.data(), wrong[0] == 'f' ? 5 : 12, nullptr, 0));
  }
  auto bad = dynamic(scaled_step(DataType::kINT8));
  bad[13].desc.dims.d[1] = 8;
  std::printf("refused scales %d\n", scaled.build->configurePlugin(bad.data(), 14, nullptr, 0));
  auto small = bounds;
  small[14].desc.dims.d[2] = 16 * 64;
  std::printf("refused screen %d\n", screened.build->configurePlugin(small.data(), 16, nullptr, 0));
  std::printf("refused unscaled %d\n", scaled.build->configurePlugin(bad.data(), 12, nullptr, 0));
  Fields unknown("softmin"), endless("entmax"), many("softmax", 9), none("softmax");
  endless.alpha = 1.0f;
  none.fields.erase(none.fields.begin() + 1);
  for (const Fields* wrong : {&unknown, &endless, &many, &none}) std::printf("created %d\n", create(*wrong) != nullptr);
  library.forget_logger();
  std::printf("created %d\n", creator->createPlugin("PagedAttention", nullptr, TensorRTPhase::kBUILD) != nullptr);
  return 0;
}
