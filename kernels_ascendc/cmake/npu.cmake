# The kernels for the NPU: finds CANN and bisheng, and chooses the commands by CANN's version.
#
#   CANN       kernel type          pages of the CANN documentation
#   9.0 on     attributes           "Common Compilation Options", "SIMD BuiltIn keywords"
#   8.3, 8.5   a macro in the body  the same of 8.3.RC1, "Setting the Kernel Type"
#
# 8.0 to 8.2 are refused: their bisheng takes kernels as -xcce only, where the macro stands for nothing unless CANN's
# own build plugin reads it. Kernels would lack the mixed type, without which SyncAll hangs, and the plugin's options.
# moe_triton/backends/npu/toolchain.py reads the same files and says the same; tests/build keeps them in step.

set(CANN_HOME "" CACHE PATH "Where CANN is, if not in ASCEND_HOME_PATH, which set_env.sh sets")
set(BISHENG "" CACHE FILEPATH "The compiler, if not CANN_HOME's")
set(CANN_VERSION "" CACHE STRING "CANN's version where its files do not say it, as 8.5.0")
set(CANN_MACHINE "${CMAKE_HOST_SYSTEM_PROCESSOR}" CACHE STRING "This machine's architecture, as uname and CANN call it")
set(NPU_ARCH dav-2201 CACHE STRING "Architecture for bisheng; dav-2201 is A2 and A3")
set(MOE_MEMFABRIC "" CACHE PATH
    "memfabric-hybrid's Python package, memfabric_hybrid: kernels post by its RoCE write. Empty: they do not post")
set(MEMFABRIC_HEADER include/smem/device/smem_shm_aicore_base_rdma.h)
set(NPU_LIBRARY libmoe_kernels_npu.so)
set(OLDEST_CANN 8.3)
set(WHY_OLDEST_CANN "before that, bisheng by itself makes no kernel whose blocks can meet in SyncAll: they would hang")
# Not cached: the next configuration may see another CANN.
if(NOT CANN_HOME)
  set(CANN_HOME "$ENV{ASCEND_HOME_PATH}")
endif()

# Sets `out` to CANN's version, empty where no file tells: ascend_toolkit_install.info ("Querying the Software
# Package Version") of this machine's architecture, or version.cfg, which older packages have.
function(moe_read_cann_version home out)
  set(${out} "" PARENT_SCOPE)
  file(GLOB files ${home}/${CANN_MACHINE}-linux/ascend_toolkit_install.info ${home}/ascend_toolkit_install.info
       ${home}/version.cfg)
  foreach(file IN LISTS files)
    file(READ ${file} text)
    # version=8.5.0, or toolkit_running_version=[7.7.0.1.238:8.2.RC1]. One `if` each: the last match is what counts.
    foreach(pattern "version=" "toolkit_running_version=[^\r\n]*:")
      if(text MATCHES "(^|\n)${pattern}([0-9]+\\.[0-9]+[^]\r\n]*)")
        set(${out} ${CMAKE_MATCH_2} PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endforeach()
endfunction()

# Sets `problem` to why the kernels cannot be built, or to nothing and the found_* variables to what was found.
function(moe_find_npu_toolchain problem)
  set(${problem} "" PARENT_SCOPE)
  if(NOT CANN_HOME OR NOT IS_DIRECTORY "${CANN_HOME}")
    set(${problem} "CANN_HOME is '${CANN_HOME}', but it must be CANN's folder: install CANN and source its \
set_env.sh, or pass -DCANN_HOME=PATH" PARENT_SCOPE)
    return()
  endif()
  file(GLOB machines RELATIVE ${CANN_HOME} ${CANN_HOME}/*-linux)
  if(machines AND NOT ${CANN_MACHINE}-linux IN_LIST machines)
    list(TRANSFORM machines REPLACE "-linux$" "")
    list(JOIN machines " and " machines)
    set(${problem} "CANN in ${CANN_HOME} does not run here: it is for ${machines}, and this machine is \
${CANN_MACHINE}. Install the ${CANN_MACHINE} package of CANN's toolkit and source its set_env.sh" PARENT_SCOPE)
    return()
  endif()
  # CANN's own folders first: another CANN's bisheng may be on the PATH.
  set(bisheng ${BISHENG})
  if(NOT bisheng)
    find_program(bisheng bisheng PATHS ${CANN_HOME}/bin ${CANN_HOME}/compiler/ccec_compiler/bin NO_CACHE
                 NO_DEFAULT_PATH)
    find_program(bisheng bisheng NO_CACHE)
  endif()
  if(NOT bisheng)
    set(${problem} "${CANN_HOME} has no bisheng, nor has the PATH: install CANN's toolkit package and source \
its set_env.sh" PARENT_SCOPE)
    return()
  endif()
  set(version "${CANN_VERSION}")
  if(NOT version)
    moe_read_cann_version("${CANN_HOME}" version)
  endif()
  if(NOT version MATCHES "^([0-9]+\\.[0-9]+)")
    set(${problem} "no file in ${CANN_HOME} tells CANN's version: pass -DCANN_VERSION=, as 8.5.0" PARENT_SCOPE)
    return()
  endif()
  if(CMAKE_MATCH_1 VERSION_LESS OLDEST_CANN)
    set(${problem} "CANN is ${version} (in ${CANN_HOME}), but it must be ${OLDEST_CANN} or later \
(${WHY_OLDEST_CANN}): install a newer one" PARENT_SCOPE)
    return()
  endif()
  set(definitions "")
  if(CMAKE_MATCH_1 VERSION_LESS 9.0)
    set(definitions -DMOE_KERNEL_TYPE_BY_MACRO)
  endif()
  if(MOE_MEMFABRIC)
    if(NOT EXISTS "${MOE_MEMFABRIC}/${MEMFABRIC_HEADER}")
      set(${problem} "MOE_MEMFABRIC is '${MOE_MEMFABRIC}', but it must be the folder of the Python package \
memfabric_hybrid, which has ${MEMFABRIC_HEADER}: pip install memfabric-hybrid==1.3.0, or leave it out" PARENT_SCOPE)
      return()
    endif()
    get_filename_component(folder ${MOE_MEMFABRIC}/${MEMFABRIC_HEADER} DIRECTORY)
    list(APPEND definitions -DMOE_MEMFABRIC -I${folder})
  endif()
  set(found_bisheng ${bisheng} PARENT_SCOPE)
  set(found_version ${version} PARENT_SCOPE)
  set(found_definitions ${definitions} PARENT_SCOPE)
endfunction()

# Adds the library. OPTIONAL: what is missing or fails is a warning, and everything else is built.
function(moe_add_npu_library requirement)
  moe_find_npu_toolchain(problem)
  if(problem)
    if(requirement STREQUAL "REQUIRED")
      message(FATAL_ERROR "The kernels cannot be built for the NPU: ${problem}.")
    endif()
    message(WARNING "Without the kernels for the NPU: ${problem}. Later: moe-triton build.")
    return()
  endif()
  message(STATUS "CANN ${found_version} in ${CANN_HOME}")

  set(library ${CMAKE_CURRENT_BINARY_DIR}/${NPU_LIBRARY})
  set(command ${found_bisheng} -x asc -shared -fPIC -O2 -std=c++17 ${found_definitions} --npu-arch=${NPU_ARCH}
      -I${GENERATED} -I${CMAKE_CURRENT_SOURCE_DIR}/include ${LAUNCHERS} -o ${library})
  file(GLOB headers CONFIGURE_DEPENDS include/*.h launch/*.h ${GENERATED}/*.h)
  # A failure that is only warned of leaves no stamp: the next build tries again.
  set(stamp ${CMAKE_CURRENT_BINARY_DIR}/npu.stamp)
  add_custom_command(
    OUTPUT ${stamp}
    COMMAND ${CMAKE_COMMAND} -DREQUIREMENT=${requirement} -DLIBRARY=${library} -DSTAMP=${stamp}
            -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/run_bisheng.cmake -- ${command}
    DEPENDS ${LAUNCHERS} ${headers}
    VERBATIM)
  add_custom_target(moe_kernels_npu ALL DEPENDS ${stamp})
  set(may_miss "")
  if(requirement STREQUAL "OPTIONAL")
    set(may_miss OPTIONAL)
  endif()
  install(FILES ${library} DESTINATION ${INSTALL_FOLDER} COMPONENT library ${may_miss})
endfunction()
