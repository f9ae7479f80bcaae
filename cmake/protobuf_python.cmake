# The Python packages sharp.v1 and sharp.kserve from proto/sharp/, for the wheel.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
file(GLOB protos CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/proto/sharp/*/*.proto)
if(protos)
  set(generated ${PROJECT_BINARY_DIR}/proto)
  set(stamp ${generated}/generated)
  add_custom_command(
    OUTPUT ${stamp}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${generated}
    COMMAND ${Python_EXECUTABLE} -m grpc_tools.protoc -I ${PROJECT_SOURCE_DIR}/proto
      --python_out=${generated} --pyi_out=${generated} --grpc_python_out=${generated} ${protos}
    COMMAND ${CMAKE_COMMAND} -E touch ${stamp}
    DEPENDS ${protos}
    VERBATIM)
  add_custom_target(protobuf_python ALL DEPENDS ${stamp})
  install(DIRECTORY ${generated}/sharp/ DESTINATION sharp FILES_MATCHING PATTERN "*.py" PATTERN "*.pyi")
endif()
