// TensorRT's plugins called directly: what TensorRT does around one `enqueue`, as C functions for bench/gpu/library.py.
//
// A null workspace asks for its size only. They return 0, or the number of the step that failed; the plugin's own words
// go to stderr.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "call_sizes.h"
#include "sharp_cuda.h"

#define SHARP_EXPORT extern "C" __attribute__((visibility("default")))

using namespace nvinfer1;

namespace {

DataType type_of(SharpType type) {
  const DataType types[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT8, DataType::kFP8};
  return types[type];
}

// Tensors of one side of a node, in its order, and their memory.
template <typename Pointer>
struct Tensors {
  std::vector<PluginTensorDesc> descriptions;
  std::vector<Pointer> memory;

  void add(Pointer pointer, DataType type, std::initializer_list<int64_t> shape) {
    PluginTensorDesc description{};
    for (int64_t size : shape) description.dims.d[description.dims.nbDims++] = size;
    description.type = type;
    description.format = TensorFormat::kLINEAR;
    descriptions.push_back(description);
    memory.push_back(pointer);
  }
  // An input that may be left out is then of no elements.
  void add_optional(Pointer pointer, DataType type, std::initializer_list<int64_t> shape) {
    pointer == nullptr ? add(nullptr, type, {0}) : add(pointer, type, shape);
  }
  int32_t count() const { return static_cast<int32_t>(memory.size()); }
};
using Inputs = Tensors<const void*>;
using Outputs = Tensors<void*>;

// The op's creator, and the plugin that it makes of a node.
struct Made {
  IPluginCreatorV3One* creator;
  IPluginV3* plugin;
};

Made make(const char* library, const char* op, const char* version, const SharpAttributes& attributes) {
  void* handle = dlopen(library, RTLD_NOW);
  if (handle == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), Made{};
  int32_t count = 0;
  auto* creators = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(handle, "getCreators"))(count);
  const char* normalizer = sharp::kNormalizers[attributes.normalizer].name;
  std::vector<PluginField> fields;
  for (const sharp::AttributeDefinition& attribute : sharp::kAttributes) {
    const void* data = reinterpret_cast<const char*>(&attributes) + attribute.offset;
    switch (attribute.type) {
      case sharp::AttributeType::kString:
        fields.push_back({attribute.name, normalizer, PluginFieldType::kCHAR, int32_t(std::strlen(normalizer))});
        break;
      case sharp::AttributeType::kFloats:
        fields.push_back({attribute.name, data, PluginFieldType::kFLOAT32, attributes.temperature_terms});
        break;
      case sharp::AttributeType::kFloat:
        fields.push_back({attribute.name, data, PluginFieldType::kFLOAT32, 1});
        break;
      case sharp::AttributeType::kInt:
        fields.push_back({attribute.name, data, PluginFieldType::kINT32, 1});
        break;
    }
  }
  const PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
  for (int32_t index = 0; index < count; ++index) {
    auto* creator = static_cast<IPluginCreatorV3One*>(creators[index]);
    if (std::strcmp(creator->getPluginName(), op) == 0 && std::strcmp(creator->getPluginVersion(), version) == 0)
      return {creator, creator->createPlugin(op, &collection, TensorRTPhase::kBUILD)};
  }
  return {};
}

int call(const Made& made, const Inputs& inputs, const Outputs& outputs, void* workspace, size_t* workspace_bytes,
         SharpStream stream) {
  const std::unique_ptr<IPluginV3> built(made.plugin);
  if (built == nullptr) return 1;
  auto* build = static_cast<IPluginV3OneBuild*>(built->getCapabilityInterface(PluginCapabilityType::kBUILD));
  auto* first = static_cast<IPluginV3OneRuntime*>(built->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  std::vector<DynamicPluginTensorDesc> dynamic;
  for (const PluginTensorDesc& input : inputs.descriptions)
    dynamic.push_back({input, input.dims, input.dims, input.dims});
  if (build->configurePlugin(dynamic.data(), inputs.count(), nullptr, 0) != 0) return 2;
  *workspace_bytes = build->getWorkspaceSize(dynamic.data(), inputs.count(), nullptr, 0);
  if (workspace == nullptr) return 0;

  // As from an engine: a plugin that builds would only write zeros.
  const std::unique_ptr<IPluginV3> read(made.creator->createPlugin(
      made.creator->getPluginName(), first->getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
  if (read == nullptr) return 1;
  first = static_cast<IPluginV3OneRuntime*>(read->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  const std::unique_ptr<IPluginV3> attached(first->attachToContext(nullptr));
  auto* runtime = static_cast<IPluginV3OneRuntime*>(attached->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  const PluginTensorDesc *from = inputs.descriptions.data(), *to = outputs.descriptions.data();
  if (runtime->onShapeChange(from, inputs.count(), to, outputs.count()) != 0) return 3;
  return runtime->enqueue(from, to, inputs.memory.data(), outputs.memory.data(), workspace, stream) == 0 ? 0 : 4;
}

}  // namespace

// The caches of the problem, their scales or their screen become those of `updated`, in the order of the outputs, which
// may be the same memory.
SHARP_EXPORT int sharp_call_paged_attention(const char* library, const SharpPagedAttention* problem,
                                            void* const* updated, void* workspace, size_t* workspace_bytes,
                                            SharpStream stream) {
  const SharpPagedAttention& p = *problem;
  const DataType type = type_of(p.type), cache = type_of(p.cache_type);
  Inputs inputs;
  inputs.add(p.query, type, {p.tokens, p.q_heads, p.head_dim});
  inputs.add(p.key, type, {p.tokens, p.kv_heads, p.head_dim});
  inputs.add(p.value, type, {p.tokens, p.kv_heads, p.value_dim});
  inputs.add(p.key_cache, cache, {p.blocks, p.kv_heads, p.head_dim, p.block_size});
  inputs.add(p.value_cache, cache, {p.blocks, p.kv_heads, p.block_size, p.value_dim});
  inputs.add(p.slot_mapping, DataType::kINT32, {p.tokens});
  inputs.add(p.block_table, DataType::kINT32, {p.sequences, p.max_blocks});
  inputs.add(p.query_start, DataType::kINT32, {p.sequences + 1});
  inputs.add(p.context_lens, DataType::kINT32, {p.sequences});
  inputs.add_optional(p.head_params, DataType::kFLOAT, {p.q_heads, p.parameters});
  inputs.add_optional(p.alibi_slopes, DataType::kFLOAT, {p.q_heads});
  inputs.add_optional(p.collect_stats, DataType::kBOOL, {});
  Outputs outputs;
  outputs.add(p.output, type, {p.tokens, p.q_heads, p.value_dim});
  outputs.add(updated[0], cache, {p.blocks, p.kv_heads, p.head_dim, p.block_size});
  outputs.add(updated[1], cache, {p.blocks, p.kv_heads, p.block_size, p.value_dim});
  outputs.add(p.stats, DataType::kFLOAT, {p.tokens, p.q_heads, p.attributes.stats_columns});
  const bool scaled = sharp::has_scales(p.cache_type);
  if (scaled) {
    inputs.add(p.key_scale, DataType::kFLOAT, {p.blocks, p.kv_heads});
    inputs.add(p.value_scale, DataType::kFLOAT, {p.blocks, p.kv_heads});
    outputs.add(updated[2], DataType::kFLOAT, {p.blocks, p.kv_heads});
    outputs.add(updated[3], DataType::kFLOAT, {p.blocks, p.kv_heads});
  }
  if (p.screened) {
    const int64_t screen_bytes = sharp::screen_bytes(p.head_dim, p.block_size);
    inputs.add_optional(nullptr, DataType::kFLOAT, {});
    inputs.add_optional(nullptr, DataType::kFLOAT, {});
    inputs.add(p.key_screen, DataType::kINT8, {p.blocks, p.kv_heads, screen_bytes});
    inputs.add_optional(p.key_shift, DataType::kFLOAT, {p.kv_heads, p.head_dim});
    outputs.add(updated[2], DataType::kINT8, {p.blocks, p.kv_heads, screen_bytes});
  }
  const Made made = make(library, "PagedAttention", scaled ? "2" : p.screened ? "3" : "1", p.attributes);
  return call(made, inputs, outputs, workspace, workspace_bytes, stream);
}

// In a shared buffer the problem's presents may be its past.
SHARP_EXPORT int sharp_call_attention(const char* library, const SharpAttention* problem, void* workspace,
                                      size_t* workspace_bytes, SharpStream stream) {
  const SharpAttention& p = *problem;
  const DataType type = type_of(p.type);
  const int64_t places = sharp::slots_of(p);
  Inputs inputs;
  inputs.add(p.query, type, {p.batch, p.q_heads, p.queries, p.head_dim});
  inputs.add(p.key, type, {p.batch, p.kv_heads, p.new_keys, p.head_dim});
  inputs.add(p.value, type, {p.batch, p.kv_heads, p.new_keys, p.value_dim});
  inputs.add_optional(p.past_key, type, {p.batch, p.kv_heads, p.capacity, p.head_dim});
  inputs.add_optional(p.past_value, type, {p.batch, p.kv_heads, p.capacity, p.value_dim});
  inputs.add_optional(p.past_lens, DataType::kINT32, {p.batch});
  inputs.add_optional(p.total_lens, DataType::kINT32, {p.batch});
  inputs.add_optional(p.head_params, DataType::kFLOAT, {p.q_heads, p.parameters});
  inputs.add_optional(p.alibi_slopes, DataType::kFLOAT, {p.q_heads});
  inputs.add_optional(p.collect_stats, DataType::kBOOL, {});
  Outputs outputs;
  outputs.add(p.output, type, {p.batch, p.q_heads, p.queries, p.value_dim});
  outputs.add(p.present_key, type, {p.batch, p.kv_heads, places, p.head_dim});
  outputs.add(p.present_value, type, {p.batch, p.kv_heads, places, p.value_dim});
  outputs.add(p.stats, DataType::kFLOAT, {p.batch, p.q_heads, p.queries, p.attributes.stats_columns});
  return call(make(library, "SharpAttention", "1", p.attributes), inputs, outputs, workspace, workspace_bytes, stream);
}
