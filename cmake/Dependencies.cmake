# What oproj stands on, as imported targets.

find_package(PkgConfig REQUIRED)
find_package(MPI REQUIRED COMPONENTS C)
find_package(OpenMP REQUIRED COMPONENTS C)
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
pkg_check_modules(HWLOC REQUIRED IMPORTED_TARGET hwloc)
pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)

# OPROJ_PYTHON: the one named by the user, or else the first with numpy of the python3 on PATH and
# the system's own (the default python3 of a machine with pyenv or conda often has none).
function(oproj_find_python)
  find_program(default NAMES python3 NO_CACHE)
  find_program(system NAMES python3 PATHS /usr/bin NO_DEFAULT_PATH NO_CACHE)
  set(candidates ${default} ${system})
  if(OPROJ_PYTHON)
    set(candidates ${OPROJ_PYTHON})
  endif()
  foreach(python IN LISTS candidates)
    execute_process(COMMAND ${python} -c "import numpy" RESULT_VARIABLE failed
                    OUTPUT_QUIET ERROR_QUIET)
    if(failed STREQUAL "0")
      set(OPROJ_PYTHON ${python} CACHE FILEPATH "A python3 with numpy, for the tests" FORCE)
      message(STATUS "Python with numpy: ${python}")
      return()
    endif()
  endforeach()
  list(REMOVE_DUPLICATES candidates)
  list(TRANSFORM candidates REPLACE ".*-NOTFOUND" "no python3 found")
  list(JOIN candidates ", " tried)
  message(FATAL_ERROR "The tests need a python3 with numpy (tried: ${tried}). Install "
                      "python3-numpy, name one with -DOPROJ_PYTHON=..., or build without tests: "
                      "-DOPROJ_TESTS=OFF.")
endfunction()

if(OPROJ_TESTS)
  pkg_check_modules(CHECK REQUIRED IMPORTED_TARGET check)
  oproj_find_python()
endif()

if(OPROJ_CUDA)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} REQUIRED)
  find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR} REQUIRED)
  add_library(oproj::nccl UNKNOWN IMPORTED)
  set_target_properties(oproj::nccl PROPERTIES IMPORTED_LOCATION ${NCCL_LIBRARY}
                        INTERFACE_INCLUDE_DIRECTORIES ${NCCL_INCLUDE_DIR})
endif()
