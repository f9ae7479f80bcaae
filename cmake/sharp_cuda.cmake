# libsharp_cuda.so, the kernels of `make kernels` and what launches them, and libsharp_trt.so, TensorRT's plugin. Both load
# on machines without a GPU: the CUDA driver is found at run time, TensorRT calls the plugin and not the other way round.
option(SHARP_CUDA "Build the libraries for NVIDIA GPUs; run `make kernels` first" OFF)
option(SHARP_TENSORRT "With SHARP_CUDA: build TensorRT's plugin too" ON)
set(SHARP_KERNELS ${PROJECT_SOURCE_DIR}/build/kernels CACHE PATH "What build_kernels.py wrote")
if(NOT SHARP_CUDA)
  return()
endif()
if(NOT EXISTS ${SHARP_KERNELS}/kernels.cc)
  message(FATAL_ERROR "SHARP_CUDA needs the compiled kernels, and ${SHARP_KERNELS} has none: run `make kernels`")
endif()
include(cmake/gpu_headers.cmake)

function(sharp_gpu_library name)
  target_include_directories(${name} PRIVATE plugins/cuda plugins/op)
  target_include_directories(${name} SYSTEM PRIVATE ${SHARP_CUDA_INCLUDE_DIR})
  target_compile_options(${name} PRIVATE -Wall -Wextra)
  target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc -Wl,--no-undefined)
  set_target_properties(${name} PROPERTIES INSTALL_RPATH "$ORIGIN" BUILD_RPATH "$ORIGIN")
  install(TARGETS ${name} DESTINATION sharp/plugins/lib)
endfunction()

add_library(sharp_cuda SHARED
  plugins/cuda/attention.cc
  plugins/cuda/driver.cc
  plugins/cuda/added_kernels.cc
  plugins/cuda/kernels.cc
  plugins/cuda/paged_attention.cc
  plugins/cuda/sampling.cc
  plugins/cuda/launch_plan.cc
  plugins/cuda/plan.cc
  plugins/op/check.cc
  ${SHARP_KERNELS}/kernels.cc)
set_source_files_properties(${SHARP_KERNELS}/kernels.cc PROPERTIES OBJECT_DEPENDS ${SHARP_KERNELS}/kernels.bin)
target_link_libraries(sharp_cuda PRIVATE ${CMAKE_DL_LIBS})
sharp_gpu_library(sharp_cuda)
target_link_options(sharp_cuda PRIVATE -Wl,--version-script=${PROJECT_SOURCE_DIR}/plugins/cuda/exports.map)

if(SHARP_TENSORRT)
  add_library(sharp_trt SHARED
    plugins/tensorrt/attention_plugin.cc
    plugins/tensorrt/attributes.cc
    plugins/tensorrt/creators.cc
    plugins/tensorrt/paged_attention_plugin.cc
    plugins/tensorrt/plugin.cc
    plugins/op/check.cc)
  target_include_directories(sharp_trt SYSTEM PRIVATE ${SHARP_TENSORRT_INCLUDE_DIR})
  target_link_libraries(sharp_trt PRIVATE sharp_cuda)
  sharp_gpu_library(sharp_trt)
  target_link_options(sharp_trt PRIVATE -Wl,--version-script=${PROJECT_SOURCE_DIR}/plugins/tensorrt/exports.map)

  # For bench/gpu/library.py: calls the plugin without TensorRT.
  add_library(sharp_plugin_call SHARED EXCLUDE_FROM_ALL bench/gpu/plugin_call.cc)
  target_include_directories(sharp_plugin_call PRIVATE plugins/cuda plugins/op)
  target_include_directories(sharp_plugin_call SYSTEM PRIVATE ${SHARP_CUDA_INCLUDE_DIR} ${SHARP_TENSORRT_INCLUDE_DIR})
  target_link_libraries(sharp_plugin_call PRIVATE ${CMAKE_DL_LIBS})
endif()
