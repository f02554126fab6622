# SPDX-License-Identifier: Apache-2.0
# One library lib<family>_<backend>.so per backend of an operator package.
#
#   muspace_add_backends(<family>
#     BIND csrc/bind.cc                 # FFI exports, compiled once per backend, no kernel in it
#     CPU  csrc/<stem>_cpu.cc ...       # host loops
#     GPU  csrc/<stem>_gpu.inl ...      # kernels, one text for cuda, hip, musa and emu
#     DESTINATION <import name>/_lib)
#
# Every GPU entry gets a one-line translation unit in the build tree. An entry may be cut into units that compile in
# parallel: `csrc/x_gpu.inl:forward:backward` makes two, which define MSP_PARTS=1 and MSP_PART_FORWARD=1 or
# MSP_PART_BACKWARD=1 before they include the text.
#
# Options
#   MUSPACE_BACKENDS    semicolon list among cpu cuda hip musa emu                                     (cpu)
#   MUSPACE_CUDA_ARCHS  as CMAKE_CUDA_ARCHITECTURES                                                    (80-real;90)
#   MUSPACE_HIP_ARCHS   AMD targets                                                                    (gfx906;gfx90a)
#   MUSA_ARCH           31 means mp_31                                                                 (31)
#   MUSA_HOME           folder with bin/mcc, include and lib                              (environment, /usr/local/musa)
#   MUSPACE_SANITIZE    address (ASan and UBSan) or thread; adds the export sanitizer_probe            (off)
#   MUSPACE_EMU_ALIAS   musa: the emu library is named lib<family>_musa.so and takes kDLExtDev tensors (off)
include_guard(GLOBAL)

set(MUSPACE_BACKENDS "cpu" CACHE STRING "Backends to build: cpu cuda hip musa emu")
set(MUSPACE_CUDA_ARCHS "80-real;90" CACHE STRING "CUDA architectures")
set(MUSPACE_HIP_ARCHS "gfx906;gfx90a" CACHE STRING "AMD GPU targets")
set(MUSA_ARCH "31" CACHE STRING "Moore Threads architecture, 31 for mp_31")
set(MUSPACE_SANITIZE "" CACHE STRING "address, thread or empty")
set(MUSPACE_EMU_ALIAS "" CACHE STRING "musa or empty")
set(MUSPACE_NATIVE_DIR "${CMAKE_CURRENT_LIST_DIR}/..")

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
find_package(Threads REQUIRED)
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

# One answer of `python -m tvm_ffi.config`; the wheel of the build environment supplies headers and library.
function(_muspace_ask_tvm_ffi option variable)
  execute_process(COMMAND "${Python_EXECUTABLE}" -m tvm_ffi.config ${option}
    OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE code ERROR_VARIABLE text)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "muSPACE needs apache-tvm-ffi in ${Python_EXECUTABLE}: ${text}")
  endif()
  set(${variable} "${answer}" PARENT_SCOPE)
endfunction()

function(_muspace_find_tvm_ffi)
  if(TARGET muspace_tvm_ffi)
    return()
  endif()
  _muspace_ask_tvm_ffi(--includedir include)
  _muspace_ask_tvm_ffi(--dlpack-includedir dlpack)
  _muspace_ask_tvm_ffi(--libdir library)
  add_library(muspace_tvm_ffi INTERFACE IMPORTED GLOBAL)
  set_target_properties(muspace_tvm_ffi PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${include};${dlpack}" INTERFACE_LINK_LIBRARIES "${library}/libtvm_ffi.so")
endfunction()

# The translation units of the GPU texts for one backend. `suffix` is .cu, .hip, .mu or _emu.cc.
function(_muspace_write_units suffix variable)
  set(units)
  foreach(entry IN LISTS ARGN)
    string(REPLACE ":" ";" parts "${entry}")
    list(POP_FRONT parts text)
    get_filename_component(stem "${text}" NAME_WE)
    string(REGEX REPLACE "_gpu$" "" stem "${stem}")
    get_filename_component(text "${text}" ABSOLUTE)
    set(include "#include \"${text}\"\n")
    if(NOT parts)
      set(unit "${CMAKE_CURRENT_BINARY_DIR}/units/${stem}${suffix}")
      file(CONFIGURE OUTPUT "${unit}" CONTENT "${include}" @ONLY)
      list(APPEND units "${unit}")
    endif()
    foreach(part IN LISTS parts)
      string(TOUPPER "${part}" macro)
      set(unit "${CMAKE_CURRENT_BINARY_DIR}/units/${stem}_${part}${suffix}")
      file(CONFIGURE OUTPUT "${unit}" CONTENT "#define MSP_PARTS 1\n#define MSP_PART_${macro} 1\n${include}" @ONLY)
      list(APPEND units "${unit}")
    endforeach()
  endforeach()
  set(${variable} "${units}" PARENT_SCOPE)
endfunction()

# Flags of every host C++ unit. No contraction: fused multiply-adds are written out, so all backends agree at borders.
set(_muspace_host_flags -ffp-contract=off -Wall -Wextra -Wno-psabi -Wno-missing-field-initializers)

function(_muspace_sanitize target)
  if(MUSPACE_SANITIZE STREQUAL "address")
    set(flags -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1 -g)
  elseif(MUSPACE_SANITIZE STREQUAL "thread")
    set(flags -fsanitize=thread -g)
  elseif(MUSPACE_SANITIZE)
    message(FATAL_ERROR "MUSPACE_SANITIZE is '${MUSPACE_SANITIZE}'; expected address, thread or nothing")
  else()
    return()
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${flags}>")
  target_link_options(${target} PRIVATE ${flags})
  target_compile_definitions(${target} PRIVATE MSP_SANITIZE=1)
endfunction()

include("${CMAKE_CURRENT_LIST_DIR}/MuspaceToolchains.cmake")

function(_muspace_add_library family backend destination)
  cmake_parse_arguments(PARSE_ARGV 3 arg "" "" "SOURCES")
  set(target ${family}_${backend})
  set(name ${target})
  string(TOUPPER "${backend}" macro)
  add_library(${target} MODULE ${arg_SOURCES})
  target_include_directories(${target} PRIVATE "${MUSPACE_NATIVE_DIR}/include" "${CMAKE_CURRENT_SOURCE_DIR}/csrc")
  target_compile_definitions(${target} PRIVATE MSP_BACKEND_${macro}=1)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${_muspace_host_flags}>")
  target_link_libraries(${target} PRIVATE muspace_tvm_ffi Threads::Threads)
  if(backend STREQUAL "emu" AND MUSPACE_EMU_ALIAS STREQUAL "musa")
    set(name ${family}_musa)
    target_compile_definitions(${target} PRIVATE MSP_EMU_ALIAS_MUSA=1)
  endif()
  set_target_properties(${target} PROPERTIES
    OUTPUT_NAME ${name} PREFIX lib SUFFIX .so SKIP_BUILD_RPATH TRUE INSTALL_RPATH ""
    CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden HIP_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    LINK_DEPENDS "${MUSPACE_NATIVE_DIR}/cmake/exports.map")
  # nodelete: the threads of the CPU pool sleep in this code and must not lose it
  target_link_options(${target} PRIVATE "-Wl,--version-script=${MUSPACE_NATIVE_DIR}/cmake/exports.map" -Wl,-z,nodelete)
  if(NOT MUSPACE_SANITIZE)
    target_link_options(${target} PRIVATE -Wl,--no-undefined)
  endif()
  _muspace_sanitize(${target})
  install(TARGETS ${target} LIBRARY DESTINATION ${destination})
endfunction()

function(muspace_add_backends family)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "DESTINATION" "BIND;CPU;GPU")
  _muspace_find_tvm_ffi()
  list(APPEND arg_CPU "${MUSPACE_NATIVE_DIR}/csrc/fill_zero_cpu.cc")
  list(APPEND arg_GPU "${MUSPACE_NATIVE_DIR}/csrc/fill_zero_gpu.inl")
  if("emu" IN_LIST MUSPACE_BACKENDS AND "musa" IN_LIST MUSPACE_BACKENDS AND MUSPACE_EMU_ALIAS STREQUAL "musa")
    message(FATAL_ERROR "MUSPACE_EMU_ALIAS=musa names the emu library like the musa one; build only one of them")
  endif()
  foreach(backend IN LISTS MUSPACE_BACKENDS)
    if(backend STREQUAL "cpu")
      _muspace_add_library(${family} cpu ${arg_DESTINATION} SOURCES ${arg_CPU} ${arg_BIND})
    elseif(backend STREQUAL "emu")
      _muspace_write_units(_emu.cc units ${arg_GPU})
      _muspace_add_library(${family} emu ${arg_DESTINATION} SOURCES ${units} ${arg_BIND})
      target_compile_definitions(${family}_emu PRIVATE "MSP_ARCHITECTURES=\"warp32,warp64,warp128\"")
    elseif(backend MATCHES "^(cuda|hip|musa)$")
      cmake_language(CALL _muspace_add_${backend} ${family} ${arg_DESTINATION} BIND ${arg_BIND} GPU ${arg_GPU})
    else()
      message(FATAL_ERROR "MUSPACE_BACKENDS names '${backend}'; expected cpu, cuda, hip, musa or emu")
    endif()
  endforeach()
endfunction()
