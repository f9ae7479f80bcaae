// Calls libsharp_trt.so and its plugin SharpAttention as TensorRT does: `tensorrt_attention_driver LIBRARY`.
#include <cstring>

#include "tensorrt_fakes.h"

namespace {

constexpr int32_t kInputs = 10;
enum Form { kNone, kConcatenating, kShared };
const char* const kForms[] = {"none", "concatenating", "shared"};

// The inputs of a call: 3 sequences of 5 queries, 8 query heads, 2 KV heads, head_dim 64, `past` slots before 5 keys.
std::vector<PluginTensorDesc> call(Form form, DataType type = DataType::kHALF, int64_t past = 100,
                                   int64_t queries = 5) {
  const PluginTensorDesc absent = tensor(DataType::kFLOAT, dims({0})), no_lens = tensor(DataType::kINT32, dims({0}));
  const PluginTensorDesc before = form == kNone ? absent : tensor(type, dims({3, 2, past, 64}));
  return {tensor(type, dims({3, 8, queries, 64})),
          tensor(type, dims({3, 2, queries, 64})),
          tensor(type, dims({3, 2, queries, 64})),
          before,
          before,
          form == kShared ? tensor(DataType::kINT32, dims({3})) : no_lens,
          no_lens,
          absent,
          absent,
          tensor(DataType::kBOOL, dims({}))};
}

std::vector<PluginTensorDesc> with(std::vector<PluginTensorDesc> inputs, int input, DataType type, Dims shape) {
  inputs[input] = tensor(type, shape);
  return inputs;
}

// Asks position by position, as TensorRT does, and prints the pairs of types of a call and its past that are accepted.
void sweep(const Plugin& plugin, Form form) {
  for (const DataType type : {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT8, DataType::kINT32})
    for (const DataType past : {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT8}) {
      std::vector<PluginTensorDesc> tensors = call(form, type);
      tensors[3].type = tensors[4].type = past;
      if (type == DataType::kHALF) tensors[9].type = DataType::kINT32;
      for (const DataType output : {type, type, type, DataType::kFLOAT}) tensors.push_back(tensor(output, dims({})));
      const auto described = dynamic(tensors);
      bool taken = true;
      for (int32_t position = 0; taken && position < int32_t(described.size()); ++position)
        taken = plugin.build->supportsFormatCombination(position, described.data(), kInputs, 4);
      if (taken) std::printf("sweep %s %s %s\n", kForms[form], name_of(type), name_of(past));
    }
}

// Asks for every position with a type and with a layout that does not fit, and prints those that are accepted.
void sweep_wrong(const Plugin& plugin) {
  std::vector<PluginTensorDesc> right = call(kShared);
  for (const DataType output : {DataType::kHALF, DataType::kHALF, DataType::kHALF, DataType::kFLOAT})
    right.push_back(tensor(output, dims({})));
  for (size_t position = 0; position < right.size(); ++position)
    for (int wrong = 0; wrong < 2; ++wrong) {
      auto described = dynamic(right);
      if (wrong == 0) described[position].desc.type = DataType::kINT64;
      if (wrong == 1) described[position].desc.format = TensorFormat::kCHW32;
      if (plugin.build->supportsFormatCombination(int32_t(position), described.data(), kInputs, 4))
        std::printf("wrong taken at %zu\n", position);
    }
}

void print_aliases(const char* title, const Plugin& plugin) {
  std::printf("%s", title);
  for (int32_t output = 0; output < 4; ++output) std::printf(" %d", plugin.build->getAliasedInput(output));
  std::printf("\n");
}

// Prints the types and shapes of the outputs of a form with `count` inputs, whose sizes have names.
void shapes(const Plugin& plugin, Form form, int32_t count) {
  Builder builder;
  const std::vector<const char*> past_key = {"batch", "kv_heads", "past", "head_dim"},
                                 past_value = {"batch", "kv_heads", "past", "value_dim"}, absent = {"0"};
  const std::vector<const char*> names[kInputs] = {{"batch", "q_heads", "queries", "head_dim"},
                                                   {"batch", "kv_heads", "new_keys", "head_dim"},
                                                   {"batch", "kv_heads", "new_keys", "value_dim"},
                                                   form == kNone ? absent : past_key,
                                                   form == kNone ? absent : past_value,
                                                   form == kShared ? std::vector<const char*>{"batch"} : absent,
                                                   absent,
                                                   absent,
                                                   absent,
                                                   {}};
  DimsExprs inputs[kInputs]{}, outputs[4]{};
  for (int32_t input = 0; input < count; ++input)
    for (const char* name : names[input]) inputs[input].d[inputs[input].nbDims++] = builder.make(name);
  const int32_t status = plugin.build->getOutputShapes(inputs, count, nullptr, 0, outputs, 4, builder);
  DataType types[4];
  const DataType given[kInputs] = {DataType::kBF16, DataType::kBF16, DataType::kBF16};
  std::printf("shapes %s %d\n", kForms[form], status + plugin.build->getOutputDataTypes(types, 4, given, count));
  for (int32_t output = 0; output < 4; ++output) {
    std::printf("output %s %d %s", kForms[form], count, name_of(types[output]));
    for (int32_t axis = 0; axis < outputs[output].nbDims; ++axis)
      std::printf(" %s", static_cast<const Expression*>(outputs[output].d[axis])->text.c_str());
    std::printf("\n");
  }
  print_aliases("aliases", plugin);
}

struct Buffers {
  bool in_place = false;  // whether the presents are the pasts' memory
  bool presents = true;   // whether there is memory for the presents
};

// Runs a call through an attached clone; a buffer's address is its number * 4096, or null for a past without keys.
void enqueue(const char* title, const Plugin& built, const std::vector<PluginTensorDesc>& inputs,
             const Library& library, Buffers buffers = {}) {
  const Plugin plugin(built.runtime->attachToContext(nullptr));
  const int32_t count = int32_t(inputs.size());
  std::printf("%s shape %d\n", title, plugin.runtime->onShapeChange(inputs.data(), count, nullptr, 4));
  library.forget_events();  // the events of loading, which another test checks
  std::vector<const void*> from;
  for (int32_t input = 0; input < count; ++input)
    from.push_back(inputs[input].dims.nbDims == 4 && inputs[input].dims.d[2] == 0
                       ? nullptr
                       : reinterpret_cast<void*>(4096L * (input + 1)));
  std::vector<void*> to;
  for (int32_t output = 0; output < 4; ++output) to.push_back(reinterpret_cast<void*>(4096L * (output + 101)));
  for (int32_t part = 0; part < 2; ++part) {
    if (buffers.in_place) to[1 + part] = const_cast<void*>(from[3 + part]);
    if (!buffers.presents) to[1 + part] = nullptr;
  }
  void* workspace = reinterpret_cast<void*>(1L << 30);
  const std::vector<PluginTensorDesc> outputs = {inputs[0], inputs[1], inputs[2],
                                                 tensor(DataType::kFLOAT, dims({3, 8, inputs[0].dims.d[2], 5}))};
  const int32_t status = plugin.runtime->enqueue(inputs.data(), outputs.data(), from.data(), to.data(), workspace,
                                                 reinterpret_cast<cudaStream_t>(55));
  std::printf("%s enqueue %d\n", title, status);
  library.print_events(title);
}

}  // namespace

int main(int, char** arguments) {
  const Library library(arguments[1]);
  IPluginCreatorV3One* creator = library.registry.at("SharpAttention/1/");
  const auto create = [&](const Fields& fields) {
    const PluginFieldCollection collection = fields.collection();
    return creator->createPlugin("SharpAttention", &collection, TensorRTPhase::kBUILD);
  };
  const Fields fields("adaptive_softmax");
  const Plugin plugin(create(fields));
  for (const InterfaceInfo info :
       {plugin.core->getInterfaceInfo(), plugin.build->getInterfaceInfo(), plugin.runtime->getInterfaceInfo()})
    std::printf("capability %s %d.%d\n", info.kind, info.major, info.minor);
  std::printf("plugin %s %s '%s' outputs %d\n", plugin.core->getPluginName(), plugin.core->getPluginVersion(),
              plugin.core->getPluginNamespace(), plugin.build->getNbOutputs());
  std::printf("built %s\n", plugin.build->getMetadataString());
  const Plugin copy(plugin.plugin->clone());
  std::printf("cloned %s\n", copy.build->getTimingCacheID());
  // The plugin of an engine that was built before the op was renamed.
  const Plugin old(library.registry.at("Attention/1/")
                       ->createPlugin("Attention", copy.runtime->getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
  std::printf("deserialized-old %s\n", old.build->getTimingCacheID());
  const Plugin read(
      creator->createPlugin("SharpAttention", copy.runtime->getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
  std::printf("deserialized %s\n", read.build->getTimingCacheID());

  for (const Form form : {kNone, kConcatenating, kShared}) sweep(plugin, form);
  sweep_wrong(plugin);

  for (const Form form : {kNone, kConcatenating, kShared}) shapes(plugin, form, kInputs);
  shapes(plugin, kNone, 3);
  shapes(plugin, kConcatenating, 5);
  const Plugin fresh(create(fields));
  print_aliases("unasked", fresh);
  const auto described = dynamic(call(kShared));
  std::printf("configure %d\n", fresh.build->configurePlugin(described.data(), kInputs, nullptr, 0));
  print_aliases("configured", fresh);
  print_aliases("clone", Plugin(fresh.plugin->clone()));

  for (const Form form : {kNone, kConcatenating, kShared}) {
    // The network's shapes have wildcards, so the shapes of the profile's largest call count.
    auto largest = dynamic(call(form));
    for (auto& input : largest)
      if (input.desc.dims.nbDims == 4) input.desc.dims.d[0] = input.desc.dims.d[2] = -1;
    std::printf("configured-%s %d\n", kForms[form], plugin.build->configurePlugin(largest.data(), kInputs, nullptr, 0));
    std::printf("workspace-%s %zu\n", kForms[form],
                plugin.build->getWorkspaceSize(largest.data(), kInputs, nullptr, 0));
  }
  const Plugin built(plugin.plugin->clone());
  enqueue("building", built, call(kShared), library, {true, true});
  const Plugin running = deserialized(creator, plugin);
  enqueue("none", running, call(kNone), library);
  enqueue("concatenating", running, call(kConcatenating), library);
  enqueue("empty", running, call(kConcatenating, DataType::kHALF, 0), library);
  enqueue("placed", running, call(kShared), library, {true, true});
  enqueue("copied", running, call(kShared), library);
  enqueue("unread", running, call(kConcatenating), library, {false, false});
  enqueue("token", running, call(kConcatenating, DataType::kFLOAT, 100, 1), library);
  auto given = with(call(kShared), 6, DataType::kINT32, dims({3}));
  given = with(with(given, 7, DataType::kFLOAT, dims({8, 1})), 8, DataType::kFLOAT, dims({8}));
  enqueue("given", running, given, library);
  const auto all = call(kNone);
  enqueue("short", running, {all.begin(), all.begin() + 3}, library);

  const struct {
    const char* what;
    std::vector<PluginTensorDesc> inputs;
    size_t count;
  } wrong[] = {
      {"heads", with(call(kNone), 0, DataType::kHALF, dims({3, 7, 5, 64})), kInputs},
      {"channels", with(call(kNone), 1, DataType::kHALF, dims({3, 2, 5, 32})), kInputs},
      {"keys", with(call(kNone), 2, DataType::kHALF, dims({3, 2, 4, 64})), kInputs},
      {"rank", with(call(kConcatenating), 3, DataType::kHALF, dims({3, 2, 64})), kInputs},
      {"half", with(call(kConcatenating), 4, DataType::kFLOAT, dims({0})), kInputs},
      {"batch", with(call(kConcatenating), 3, DataType::kHALF, dims({2, 2, 100, 64})), kInputs},
      {"slots", with(call(kShared), 4, DataType::kHALF, dims({3, 2, 99, 64})), kInputs},
      {"buffer", with(call(kNone), 5, DataType::kINT32, dims({3})), kInputs},
      {"lens", with(call(kNone), 6, DataType::kINT32, dims({4})), kInputs},
      {"columns", with(call(kNone), 7, DataType::kFLOAT, dims({8, 2})), kInputs},
      {"slopes", with(call(kNone), 8, DataType::kFLOAT, dims({2})), kInputs},
      {"few", call(kNone), 2},
  };
  for (const auto& [what, inputs, count] : wrong)
    std::printf("refused %s %d\n", what, running.runtime->onShapeChange(inputs.data(), int32_t(count), nullptr, 4));
  Fields ssa("ssa");
  const Plugin without(create(ssa));
  std::printf("refused ssa %d\n", without.runtime->onShapeChange(all.data(), kInputs, nullptr, 4));
  const auto bfloat = call(kNone, DataType::kBF16);
  std::printf("refused kernels %d\n", running.runtime->onShapeChange(bfloat.data(), kInputs, nullptr, 4));
  return 0;
}
