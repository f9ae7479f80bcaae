# Sets ONNXRUNTIME_INCLUDE_DIR, the folder of onnxruntime_c_api.h; the script says where it looks.
if(NOT ONNXRUNTIME_INCLUDE_DIR)
  execute_process(
    COMMAND bash ${CMAKE_CURRENT_LIST_DIR}/onnxruntime_headers.sh ${PROJECT_SOURCE_DIR}/build/onnxruntime
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_VARIABLE message ERROR_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${message}")
  endif()
  set(ONNXRUNTIME_INCLUDE_DIR ${found} CACHE PATH "Folder of onnxruntime_c_api.h")
endif()
message(STATUS "ONNX Runtime headers: ${ONNXRUNTIME_INCLUDE_DIR}")
