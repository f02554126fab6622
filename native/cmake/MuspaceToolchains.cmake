# SPDX-License-Identifier: Apache-2.0
# The device compilers: nvcc through CMake's CUDA language; hipcc and mcc through one custom command per unit, because
# their CMake support differs between SDK versions.

if("cuda" IN_LIST MUSPACE_BACKENDS)  # a language is enabled at directory scope, not in a function
  set(CMAKE_CUDA_ARCHITECTURES "${MUSPACE_CUDA_ARCHS}")
  set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
  enable_language(CUDA)
endif()

function(_muspace_add_cuda family destination)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "BIND;GPU")
  _muspace_write_units(.cu units ${arg_GPU})
  _muspace_add_library(${family} cuda ${destination} SOURCES ${units} ${arg_BIND})
  set_target_properties(${family}_cuda PROPERTIES
    CUDA_ARCHITECTURES "${MUSPACE_CUDA_ARCHS}" CUDA_STANDARD 17 CUDA_RUNTIME_LIBRARY Static)
  target_compile_options(${family}_cuda PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;-Xcompiler=-ffp-contract=off>")
  string(REGEX REPLACE "([0-9]+[af]?)-real" "sm_\\1" archs "${MUSPACE_CUDA_ARCHS}")
  string(REGEX REPLACE "([0-9]+[af]?)-virtual" "compute_\\1" archs "${archs}")
  list(TRANSFORM archs REPLACE "^([0-9]+[af]?)$" "sm_\\1,compute_\\1")  # a bare number is machine code and PTX
  string(REPLACE ";" "," archs "${archs}")
  target_compile_definitions(${family}_cuda PRIVATE "MSP_ARCHITECTURES=\"${archs}\"")
endfunction()

# Objects of `units` by `compiler` with `flags`; header changes are followed through the compiler's dependency file.
function(_muspace_compile_units family backend compiler variable)
  cmake_parse_arguments(PARSE_ARGV 4 arg "" "" "UNITS;FLAGS;ENVIRONMENT")
  string(TOUPPER "${backend}" macro)
  set(objects)
  foreach(unit IN LISTS arg_UNITS)
    get_filename_component(name "${unit}" NAME)
    set(object "${CMAKE_CURRENT_BINARY_DIR}/units/${name}.o")
    add_custom_command(OUTPUT "${object}"
      COMMAND "${CMAKE_COMMAND}" -E env ${arg_ENVIRONMENT} "${compiler}" ${arg_FLAGS}
        -std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -DNDEBUG -DMSP_BACKEND_${macro}=1
        "-I${MUSPACE_NATIVE_DIR}/include" "-I${CMAKE_CURRENT_SOURCE_DIR}/csrc" -MD -MF "${object}.d"
        -c "${unit}" -o "${object}"
      DEPENDS "${unit}" DEPFILE "${object}.d" VERBATIM COMMENT "${backend}: ${name}")
    list(APPEND objects "${object}")
  endforeach()
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  set(${variable} "${objects}" PARENT_SCOPE)
endfunction()

function(_muspace_add_hip family destination)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "BIND;GPU")
  find_program(MUSPACE_HIPCC hipcc PATHS "$ENV{ROCM_PATH}/bin" /opt/dtk/bin /opt/rocm/bin NO_DEFAULT_PATH)
  find_program(MUSPACE_HIPCC hipcc REQUIRED)
  get_filename_component(home "${MUSPACE_HIPCC}" REALPATH)
  get_filename_component(home "${home}" DIRECTORY)
  get_filename_component(home "${home}" DIRECTORY)
  _muspace_write_units(.hip units ${arg_GPU})
  set(flags -x hip)
  foreach(arch IN LISTS MUSPACE_HIP_ARCHS)
    list(APPEND flags --offload-arch=${arch})
  endforeach()
  # hipcc turns into a wrapper of nvcc when it finds one, unless the platform is stated
  _muspace_compile_units(${family} hip "${MUSPACE_HIPCC}" objects UNITS ${units} FLAGS ${flags}
    ENVIRONMENT HIP_PLATFORM=amd)
  _muspace_add_library(${family} hip ${destination} SOURCES ${objects} ${arg_BIND})
  find_library(MUSPACE_HIP_RUNTIME amdhip64 HINTS "${home}/lib" "${home}/hip/lib" "$ENV{ROCM_PATH}/lib" REQUIRED)
  target_link_libraries(${family}_hip PRIVATE "${MUSPACE_HIP_RUNTIME}")
  string(REPLACE ";" "," archs "${MUSPACE_HIP_ARCHS}")
  target_compile_definitions(${family}_hip PRIVATE "MSP_ARCHITECTURES=\"${archs}\"")
endfunction()

function(_muspace_add_musa family destination)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "BIND;GPU")
  if(NOT MUSA_HOME)
    set(MUSA_HOME "$ENV{MUSA_HOME}")
  endif()
  if(NOT MUSA_HOME)
    set(MUSA_HOME /usr/local/musa)
  endif()
  if(NOT EXISTS "${MUSA_HOME}/bin/mcc")
    message(FATAL_ERROR "the musa backend needs MUSA_HOME with bin/mcc; looked in '${MUSA_HOME}'")
  endif()
  _muspace_write_units(.mu units ${arg_GPU})
  _muspace_compile_units(${family} musa "${MUSA_HOME}/bin/mcc" objects UNITS ${units}
    FLAGS -x musa --offload-arch=mp_${MUSA_ARCH} "-I${MUSA_HOME}/include")
  _muspace_add_library(${family} musa ${destination} SOURCES ${objects} ${arg_BIND})
  find_library(MUSPACE_MUSART_${family} musart HINTS "${MUSA_HOME}/lib" REQUIRED NO_CACHE)
  target_link_libraries(${family}_musa PRIVATE "${MUSPACE_MUSART_${family}}")
  target_compile_definitions(${family}_musa PRIVATE "MSP_ARCHITECTURES=\"mp_${MUSA_ARCH}\"")
endfunction()
