# The Python package sharp.v1 from proto/sharp/v1/*.proto, for the wheel.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
file(GLOB protos CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/proto/sharp/v1/*.proto)
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
  install(DIRECTORY ${generated}/sharp/v1/ DESTINATION sharp/v1 FILES_MATCHING PATTERN "*.py" PATTERN "*.pyi")
endif()
