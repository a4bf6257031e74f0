# moe_layout.h and moe_abi.h, made from the tables of the package: sets GENERATED to their folder. Sources that were
# installed have them in include/.

set(GENERATED ${CMAKE_CURRENT_SOURCE_DIR}/include)
if(OTHER_SCHEMES OR NOT EXISTS ${GENERATED}/moe_abi.h)
  set(GENERATED ${CMAKE_CURRENT_BINARY_DIR}/generated)
  set(package ${CMAKE_CURRENT_SOURCE_DIR}/../moe_triton)
  if(NOT EXISTS ${package})  # installed in it
    set(package ${CMAKE_CURRENT_SOURCE_DIR}/../..)
  endif()
  set(others ${OTHER_SCHEMES})
  list(TRANSFORM others APPEND /ascendc.py)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${others})
  list(TRANSFORM others PREPEND --with=)
  file(GLOB tables CONFIGURE_DEPENDS ${package}/core/*.py ${package}/schemes/*.py ${package}/schemes/*/ascendc.py
       ${package}/tools/codegen.py)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${tables})
  find_package(Python 3.10 COMPONENTS Interpreter REQUIRED)
  execute_process(COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/generate.py ${package} ${GENERATED} ${others}
                  COMMAND_ERROR_IS_FATAL ANY)
  install(DIRECTORY ${GENERATED}/ DESTINATION ${INSTALL_FOLDER}/kernels_ascendc/include)
endif()
