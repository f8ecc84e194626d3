# find_package(oproj) defines oproj::oproj.  oproj/mpi.h also needs MPI, which its user brings.
include(${CMAKE_CURRENT_LIST_DIR}/oprojTargets.cmake)
