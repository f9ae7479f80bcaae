// `ai.sharp::PagedAttention` for CUDAExecutionProvider: the kernels of libsharp_cuda.so on the step's stream. That
// library is looked for when this one is loaded, so that the CPU's wheel is this same library without the other.
//
// Every input stays on the device: its numbers cannot be checked here without waiting for the device, only its shape.
#include <dlfcn.h>

#include <algorithm>

#include "paged_attention_op.h"
#include "sharp_cuda.h"

namespace sharp::ort {
namespace {

struct CudaLibrary {
  decltype(&::sharp_cuda_workspace_bytes) workspace_bytes;
  decltype(&::sharp_cuda_paged_attention) paged_attention;
  decltype(&::sharp_cuda_copy) copy;
  decltype(&::sharp_cuda_last_error) last_error;

  void check(int status) const {
    if (status != 0) throw std::runtime_error(last_error());
  }
};

// Null where there is none. Never unloaded, as the device may still run its code.
const CudaLibrary* cuda_library() {
  static const CudaLibrary* const library = []() -> const CudaLibrary* {
    void* handle = dlopen("libsharp_cuda.so", RTLD_NOW | RTLD_LOCAL);  // the linker looks in our own folder
    if (handle == nullptr) return nullptr;
    static CudaLibrary found;
    const auto look_up = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      if (function == nullptr) throw std::runtime_error(std::string("libsharp_cuda.so has no ") + name);
    };
    look_up(found.workspace_bytes, "sharp_cuda_workspace_bytes");
    look_up(found.paged_attention, "sharp_cuda_paged_attention");
    look_up(found.copy, "sharp_cuda_copy");
    look_up(found.last_error, "sharp_cuda_last_error");
    return &found;
  }();
  return library;
}

// Device memory for work on the step's stream: ONNX Runtime gives it to another stream when that work is done, so it
// may be given back as soon as the work is enqueued.
class Scratch {
 public:
  Scratch(const Ort::KernelContext& context, const OrtMemoryInfo* memory, size_t bytes) {
    const OrtApi& api = Ort::GetApi();
    Ort::ThrowOnError(api.KernelContext_GetAllocator(context.GetOrtKernelContext(), memory, &allocator_));
    const OrtStatusPtr status =
        api.KernelContext_GetScratchBuffer(context.GetOrtKernelContext(), memory, bytes, &buffer_);
    if (status != nullptr) api.ReleaseAllocator(allocator_);
    Ort::ThrowOnError(status);
  }
  ~Scratch() {
    allocator_->Free(allocator_, buffer_);
    Ort::GetApi().ReleaseAllocator(allocator_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() const { return buffer_; }

 private:
  OrtAllocator* allocator_ = nullptr;
  void* buffer_ = nullptr;
};

SharpType sharp_type(ONNXTensorElementDataType type) {
  return type == kFloat16 ? SHARP_FLOAT16 : type == kBfloat16 ? SHARP_BFLOAT16 : SHARP_FLOAT32;
}

// Both have the order of the op's definition.
static_assert(static_cast<int>(cpu::NormalizerKind::kSoftmax) == SHARP_SOFTMAX &&
              static_cast<int>(cpu::NormalizerKind::kEntmax) == SHARP_ENTMAX &&
              static_cast<int>(cpu::NormalizerKind::kRelu2) == SHARP_RELU2);

SharpAttributes attributes_of(const cpu::Attributes& from) {
  if (from.temperature_terms > SHARP_MAX_TEMPERATURE_TERMS)
    throw InputError("attribute temperature_coefficients has " + std::to_string(from.temperature_terms) +
                     " numbers; on a GPU there are at most " + std::to_string(SHARP_MAX_TEMPERATURE_TERMS));
  SharpAttributes attributes{};
  attributes.normalizer = static_cast<SharpNormalizer>(from.normalizer);
  attributes.scale = from.scale;
  attributes.alpha = from.alpha;
  std::copy_n(from.temperature_coefficients, from.temperature_terms, attributes.temperature_coefficients);
  attributes.temperature_terms = static_cast<int32_t>(from.temperature_terms);
  attributes.entropy_threshold = from.entropy_threshold;
  attributes.softcap = from.softcap;
  attributes.window = static_cast<int32_t>(std::min<int64_t>(from.window, INT32_MAX));
  attributes.causal = from.causal;
  return attributes;
}

// All of a call but the caches and outputs.
SharpPagedAttention call_of(const cpu::Problem& from, ElementTypes types, const Ort::KernelContext& context) {
  SharpPagedAttention call{};
  call.attributes = attributes_of(from.attributes);
  call.tokens = from.tokens;
  call.q_heads = from.q_heads;
  call.kv_heads = from.kv_heads;
  call.head_dim = from.head_dim;
  call.value_dim = from.value_dim;
  call.blocks = from.blocks;
  call.block_size = from.block_size;
  call.sequences = from.sequences;
  call.max_blocks = from.max_blocks;
  call.type = sharp_type(types.compute);
  call.cache_type = sharp_type(types.cache);
  call.query = context.GetInput(kQuery).GetTensorRawData();
  call.key = context.GetInput(kKey).GetTensorRawData();
  call.value = context.GetInput(kValue).GetTensorRawData();
  call.slot_mapping = from.slot_mapping;
  call.block_table = from.block_table;
  call.query_start = from.query_start;
  call.context_lens = from.context_lens;
  call.head_params = from.head_params;
  call.head_params_width = from.head_params_width;
  call.alibi = from.alibi_slopes != nullptr;
  call.alibi_slopes = from.alibi_slopes;
  if (is_given(context, kCollectStats))
    call.collect_stats = static_cast<const uint8_t*>(context.GetInput(kCollectStats).GetTensorRawData());
  return call;
}

struct CudaPagedAttentionKernel {
  NodeAttributes attributes;
  ElementTypes types;

  OrtStatusPtr ComputeV2(OrtKernelContext* ort_context) {
    try {
      compute(Ort::KernelContext(ort_context));
    } catch (const std::exception& error) {
      return status_of("PagedAttention", error);
    }
    return nullptr;
  }

 private:
  void compute(const Ort::KernelContext& context) const {
    const CudaLibrary& library = *cuda_library();
    const cpu::Problem problem = read_shapes(context, attributes.values, types.cache_type());
    SharpPagedAttention call = call_of(problem, types, context);
    const auto stream = static_cast<SharpStream>(context.GetGPUComputeStream());

    // The output's buffer with the input's content: the same memory when it is bound so.
    const auto updated = [&](Input input, Output output) {
      const Ort::ConstValue from = context.GetInput(input);
      const auto info = from.GetTensorTypeAndShapeInfo();
      void* to = context.GetOutput(output, info.GetShape()).GetTensorMutableRawData();
      const size_t bytes = info.GetElementCount() * cpu::bytes_of(problem.cache_type);
      if (to != from.GetTensorRawData() && bytes > 0)
        library.check(library.copy(to, from.GetTensorRawData(), bytes, stream));
      return to;
    };
    call.key_cache = updated(kKeyCache, kKeyCacheOut);
    call.value_cache = updated(kValueCache, kValueCacheOut);
    call.output = context.GetOutput(kOutput, {call.tokens, call.q_heads, call.value_dim}).GetTensorMutableRawData();
    call.stats = context.GetOutput(kStats, {call.tokens, call.q_heads, 4}).GetTensorMutableData<float>();
    if (call.tokens == 0) return;
    size_t bytes = 0;
    library.check(library.workspace_bytes(&call, &bytes));
    const Scratch workspace(context, context.GetInput(kQuery).GetTensorMemoryInfo(), bytes);
    library.check(library.paged_attention(&call, workspace.get(), stream));
  }
};

struct CudaPagedAttentionOp : PagedAttentionSchema<CudaPagedAttentionOp, CudaPagedAttentionKernel> {
  using PagedAttentionSchema::PagedAttentionSchema;
  const char* GetExecutionProviderType() const { return "CUDAExecutionProvider"; }
};

}  // namespace

std::vector<const OrtCustomOp*> cuda_paged_attention_ops() {
  if (cuda_library() == nullptr) return {};
  static const CudaPagedAttentionOp ops[] = {
      CudaPagedAttentionOp({kFloat32, kFloat32}),   CudaPagedAttentionOp({kFloat32, kFloat16}),
      CudaPagedAttentionOp({kFloat32, kBfloat16}),  CudaPagedAttentionOp({kFloat16, kFloat16}),
      CudaPagedAttentionOp({kBfloat16, kBfloat16}),
  };
  std::vector<const OrtCustomOp*> found;
  for (const CudaPagedAttentionOp& op : ops) found.push_back(&op);
  return found;
}

}  // namespace sharp::ort
