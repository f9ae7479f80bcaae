# Sets SHARP_CUDA_INCLUDE_DIR (cuda.h) and SHARP_TENSORRT_INCLUDE_DIR (NvInferRuntime.h). Neither needs a GPU or a library
# of NVIDIA's: CUDA's come from a toolkit, else from the Python package triton; TensorRT's wheels have none, so they come
# from an installed TensorRT, else from the Python package kernel-lens (10.14).
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)

function(sharp_package_folder package subfolder result)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u; s = u.find_spec('${package}'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(found)
    set(${result} "${found}/${subfolder}" PARENT_SCOPE)
  endif()
endfunction()

sharp_package_folder(triton backends/nvidia/include triton_headers)
find_path(SHARP_CUDA_INCLUDE_DIR cuda.h
  HINTS $ENV{CUDA_HOME}/include $ENV{CUDA_PATH}/include /usr/local/cuda/include ${triton_headers})
if(NOT SHARP_CUDA_INCLUDE_DIR)
  message(FATAL_ERROR "SHARP_CUDA needs CUDA's headers: set CUDA_HOME to a toolkit, or `pip install triton`")
endif()
message(STATUS "CUDA headers: ${SHARP_CUDA_INCLUDE_DIR}")

if(SHARP_TENSORRT)
  sharp_package_folder(kernel_lens include/tensorrt kernel_lens_headers)
  find_path(SHARP_TENSORRT_INCLUDE_DIR NvInferRuntime.h
    HINTS $ENV{TENSORRT_ROOT}/include ${kernel_lens_headers})
  if(NOT SHARP_TENSORRT_INCLUDE_DIR)
    message(FATAL_ERROR "SHARP_TENSORRT needs TensorRT's headers: set TENSORRT_ROOT to the folder of an unpacked TensorRT, "
      "or `pip install --no-deps kernel-lens`")
  endif()
  message(STATUS "TensorRT headers: ${SHARP_TENSORRT_INCLUDE_DIR}")
endif()
