# libsharp_ops.so: the CPU kernels and their ONNX Runtime op, and the sampler. Loops are compiled once per instruction set.
set(cpu plugins/cpu)
set(sources
  ${cpu}/aligned.cc
  ${cpu}/contiguous_attention.cc
  ${cpu}/finish.cc
  ${cpu}/isa.cc
  ${cpu}/loops_baseline.cc
  ${cpu}/paged_attention.cc
  ${cpu}/plan.cc
  ${cpu}/reach.cc
  ${cpu}/sampling.cc
  ${cpu}/store.cc
  ${cpu}/temperature.cc
  plugins/cuda/launch_plan.cc
  plugins/onnxruntime/attention_op.cc
  plugins/onnxruntime/attributes.cc
  plugins/onnxruntime/cuda_attention_op.cc
  plugins/onnxruntime/cuda_library.cc
  plugins/onnxruntime/cuda_paged_attention_op.cc
  plugins/onnxruntime/inputs.cc
  plugins/onnxruntime/paged_attention_op.cc
  plugins/op/check.cc)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND sources ${cpu}/loops_avx2.cc ${cpu}/loops_avx512.cc ${cpu}/loops_avx512_vnni.cc)
  set_source_files_properties(${cpu}/loops_avx2.cc PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c")
  set_source_files_properties(${cpu}/loops_avx512.cc PROPERTIES
    COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mfma")
  set_source_files_properties(${cpu}/loops_avx512_vnni.cc PROPERTIES
    COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mfma;-mavx512vnni")
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag("-mamx-bf16 -mavx512bf16" SHARP_AMX)
  if(SHARP_AMX)
    list(APPEND sources ${cpu}/loops_amx.cc)
    set_source_files_properties(${cpu}/loops_amx.cc PROPERTIES COMPILE_OPTIONS
      "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mfma;-mavx512vnni;-mavx512bf16;-mamx-tile;-mamx-bf16")
    set_source_files_properties(${cpu}/isa.cc PROPERTIES COMPILE_DEFINITIONS SHARP_AMX)
  endif()
endif()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64" AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  list(APPEND sources ${cpu}/loops_neon_dotprod.cc)
  set_source_files_properties(${cpu}/loops_neon_dotprod.cc PROPERTIES COMPILE_OPTIONS "-march=armv8.2-a+dotprod")
  set_source_files_properties(${cpu}/isa.cc PROPERTIES COMPILE_DEFINITIONS SHARP_NEON_DOTPROD)
endif()

add_library(sharp_ops SHARED ${sources})
target_include_directories(sharp_ops PRIVATE ${cpu} plugins/onnxruntime plugins/op)
set_source_files_properties(plugins/onnxruntime/cuda_attention_op.cc plugins/onnxruntime/cuda_library.cc
  plugins/onnxruntime/cuda_paged_attention_op.cc PROPERTIES
  INCLUDE_DIRECTORIES ${PROJECT_SOURCE_DIR}/plugins/cuda)
target_include_directories(sharp_ops SYSTEM PRIVATE ${ONNXRUNTIME_INCLUDE_DIR})
# No -ffast-math: infinities and NaN have a meaning here.
target_compile_options(sharp_ops PRIVATE -Wall -Wextra -ffp-contract=fast -fno-math-errno)
option(SHARP_SANITIZE "Build with AddressSanitizer and UndefinedBehaviorSanitizer; see `make sanitize`" OFF)
option(SHARP_MANYLINUX "Need no C library newer than glibc 2.28; see `make wheel`" OFF)
if(SHARP_SANITIZE)
  set(sanitizers -fsanitize=address,undefined -fno-sanitize-recover=all)
  target_compile_options(sharp_ops PRIVATE ${sanitizers} -g -fno-omit-frame-pointer)
  target_link_options(sharp_ops PRIVATE ${sanitizers})
elseif(SHARP_MANYLINUX)
  # libgcc_s comes from the machine: this compiler's own unwinder would want glibc 2.35. Before 2.34, threads and dlopen were in
  # libraries of their own.
  target_sources(sharp_ops PRIVATE plugins/onnxruntime/glibc_2_28.cc)
  target_link_options(sharp_ops PRIVATE -static-libstdc++ -Wl,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2,--as-needed)
else()
  target_link_options(sharp_ops PRIVATE -static-libstdc++ -static-libgcc)
endif()
target_link_options(sharp_ops PRIVATE
  -Wl,--version-script=${PROJECT_SOURCE_DIR}/plugins/onnxruntime/exports.map)
target_link_libraries(sharp_ops PRIVATE ${CMAKE_DL_LIBS})
# libsharp_cuda.so, where there is one, lies beside it.
set_target_properties(sharp_ops PROPERTIES INSTALL_RPATH "$ORIGIN" BUILD_RPATH "$ORIGIN"
  LINK_DEPENDS ${PROJECT_SOURCE_DIR}/plugins/onnxruntime/exports.map)
install(TARGETS sharp_ops DESTINATION sharp/plugins/lib)
