# Installation: library, headers, program, find_package(oproj) and pkg-config.  The prefix may be
# moved afterwards: everything in it finds its neighbours by relative paths.

include(CMakePackageConfigHelpers)

# Libraries outside the loader's own folders (an MPI or NCCL brought along) stay found.
set_target_properties(oproj oproj_program PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)

install(TARGETS oproj EXPORT oprojTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS oproj_program DESTINATION ${CMAKE_INSTALL_BINDIR})
install(PROGRAMS launch/oproj-run launch/oproj.sbatch DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES launch/env.sh DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT oprojTargets NAMESPACE oproj:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/oproj)

write_basic_package_version_file(oprojConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES cmake/oprojConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/oprojConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/oproj)

# oproj.pc lies in <libdir>/pkgconfig, and libdir may be more than one folder deep
# (lib/x86_64-linux-gnu); some distributions make it, or the include folder, absolute.
set(pc_folder ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(IS_ABSOLUTE ${CMAKE_INSTALL_LIBDIR} OR IS_ABSOLUTE ${CMAKE_INSTALL_INCLUDEDIR})
  set(OPROJ_PC_PREFIX ${CMAKE_INSTALL_PREFIX})
  set(OPROJ_PC_LIBDIR ${CMAKE_INSTALL_FULL_LIBDIR})
  set(OPROJ_PC_INCLUDEDIR ${CMAKE_INSTALL_FULL_INCLUDEDIR})
else()
  file(RELATIVE_PATH up /prefix/${pc_folder} /prefix)
  string(REGEX REPLACE "/$" "" up ${up})
  set(OPROJ_PC_PREFIX "\${pcfiledir}/${up}")
  set(OPROJ_PC_LIBDIR "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  set(OPROJ_PC_INCLUDEDIR "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
configure_file(cmake/oproj.pc.in oproj.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/oproj.pc DESTINATION ${pc_folder})
