# oproj_compile(target): the language level, warnings and sanitizers that every target shares.

set(OPROJ_WARNINGS -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla
                   -Wpointer-arith -Wwrite-strings -Werror)

function(oproj_compile target)
  set_target_properties(${target} PROPERTIES
    C_STANDARD 11 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF C_VISIBILITY_PRESET hidden)
  target_compile_definitions(${target} PRIVATE _GNU_SOURCE)
  # No FMA contraction: the rotation and the quantiser give the same bits on every machine.
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:C>:${OPROJ_WARNINGS} -ffp-contract=off>)
  if(OPROJ_SANITIZE STREQUAL "thread")
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:C>:-fsanitize=thread>)
    target_link_options(${target} PRIVATE -fsanitize=thread)
  elseif(OPROJ_SANITIZE)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:C>:-fsanitize=address,undefined -fno-sanitize-recover=undefined
                              -fno-omit-frame-pointer>)
    target_link_options(${target} PRIVATE -fsanitize=address,undefined)
  endif()
endfunction()
