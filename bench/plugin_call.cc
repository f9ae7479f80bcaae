// TensorRT's plugin called directly: what TensorRT does around one `enqueue`, as a C function for bench/gpu_library.py.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "sharp_cuda.h"

using namespace nvinfer1;

namespace {

DataType type_of(SharpType type) {
  return type == SHARP_FLOAT16 ? DataType::kHALF : type == SHARP_BFLOAT16 ? DataType::kBF16 : DataType::kFLOAT;
}

PluginTensorDesc tensor(DataType type, std::initializer_list<int64_t> shape) {
  PluginTensorDesc description{};
  for (int64_t size : shape) description.dims.d[description.dims.nbDims++] = size;
  description.type = type;
  description.format = TensorFormat::kLINEAR;
  return description;
}

}  // namespace

// Makes the plugin of `library` from the problem's attributes, and runs the problem: the caches in key_cache and
// value_cache become those in key_cache_out and value_cache_out, which may be the same memory. A null workspace asks
// for its size only. Returns 0, or the number of the step that failed; the plugin's own words go to stderr.
extern "C" __attribute__((visibility("default"))) int sharp_plugin_call(const char* library,
                                                                        const SharpPagedAttention* problem,
                                                                        void* key_cache_out, void* value_cache_out,
                                                                        void* workspace, size_t* workspace_bytes,
                                                                        SharpStream stream) {
  if (problem->type == SHARP_INT8 || problem->cache_type == SHARP_INT8)
    return std::fprintf(stderr, "the plugin has no int8 caches\n"), 6;
  void* handle = dlopen(library, RTLD_NOW);
  if (handle == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  int32_t count = 0;
  auto* creator = static_cast<IPluginCreatorV3One*>(
      reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(handle, "getCreators"))(count)[0]);

  const SharpAttributes& attributes = problem->attributes;
  const char* const normalizers[] = {"softmax", "ssa", "adaptive_softmax", "entmax", "sigmoid", "relu", "relu2"};
  const char* normalizer = normalizers[attributes.normalizer];
  const PluginField fields[] = {
      {"normalizer", normalizer, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(normalizer))},
      {"scale", &attributes.scale, PluginFieldType::kFLOAT32, 1},
      {"alpha", &attributes.alpha, PluginFieldType::kFLOAT32, 1},
      {"temperature_coefficients", attributes.temperature_coefficients, PluginFieldType::kFLOAT32,
       attributes.temperature_terms},
      {"entropy_threshold", &attributes.entropy_threshold, PluginFieldType::kFLOAT32, 1},
      {"softcap", &attributes.softcap, PluginFieldType::kFLOAT32, 1},
      {"window", &attributes.window, PluginFieldType::kINT32, 1},
      {"causal", &attributes.causal, PluginFieldType::kINT32, 1}};
  const PluginFieldCollection collection{8, fields};
  const std::unique_ptr<IPluginV3> built(creator->createPlugin("PagedAttention", &collection, TensorRTPhase::kBUILD));
  if (built == nullptr) return 2;
  auto* build = static_cast<IPluginV3OneBuild*>(built->getCapabilityInterface(PluginCapabilityType::kBUILD));
  auto* first = static_cast<IPluginV3OneRuntime*>(built->getCapabilityInterface(PluginCapabilityType::kRUNTIME));

  const SharpPagedAttention& p = *problem;
  const DataType type = type_of(p.type), cache = type_of(p.cache_type);
  const std::vector<PluginTensorDesc> inputs = {
      tensor(type, {p.tokens, p.q_heads, p.head_dim}),
      tensor(type, {p.tokens, p.kv_heads, p.head_dim}),
      tensor(type, {p.tokens, p.kv_heads, p.value_dim}),
      tensor(cache, {p.blocks, p.kv_heads, p.head_dim, p.block_size}),
      tensor(cache, {p.blocks, p.kv_heads, p.block_size, p.value_dim}),
      tensor(DataType::kINT32, {p.tokens}),
      tensor(DataType::kINT32, {p.sequences, p.max_blocks}),
      tensor(DataType::kINT32, {p.sequences + 1}),
      tensor(DataType::kINT32, {p.sequences}),
      p.head_params ? tensor(DataType::kFLOAT, {p.q_heads, p.head_params_width}) : tensor(DataType::kFLOAT, {0}),
      p.alibi ? tensor(DataType::kFLOAT, {p.q_heads}) : tensor(DataType::kFLOAT, {0}),
      p.collect_stats ? tensor(DataType::kBOOL, {}) : tensor(DataType::kBOOL, {0})};
  const std::vector<PluginTensorDesc> outputs = {tensor(type, {p.tokens, p.q_heads, p.value_dim}), inputs[3], inputs[4],
                                                 tensor(DataType::kFLOAT, {p.tokens, p.q_heads, 4})};
  std::vector<DynamicPluginTensorDesc> dynamic;
  for (const PluginTensorDesc& input : inputs) dynamic.push_back({input, input.dims, input.dims, input.dims});
  const int32_t input_count = static_cast<int32_t>(inputs.size());
  if (build->configurePlugin(dynamic.data(), input_count, nullptr, 0) != 0) return 3;
  *workspace_bytes = build->getWorkspaceSize(dynamic.data(), input_count, nullptr, 0);
  if (workspace == nullptr) return 0;

  const std::unique_ptr<IPluginV3> attached(first->attachToContext(nullptr));
  auto* runtime = static_cast<IPluginV3OneRuntime*>(attached->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  if (runtime->onShapeChange(inputs.data(), input_count, outputs.data(), 4) != 0) return 4;
  const void* const from[] = {p.query,        p.key,          p.value,        p.key_cache,
                              p.value_cache,  p.slot_mapping, p.block_table,  p.query_start,
                              p.context_lens, p.head_params,  p.alibi_slopes, p.collect_stats};
  void* const to[] = {p.output, key_cache_out, value_cache_out, p.stats};
  return runtime->enqueue(inputs.data(), outputs.data(), from, to, workspace, stream) == 0 ? 0 : 5;
}
