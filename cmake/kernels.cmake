# What depends neither on Python nor on XLA. cgx_format is what the CPU and CUDA code share: the wire
# format and its layouts.
add_library(cgx_format STATIC xla_ffi/format/layout.cc)
target_include_directories(cgx_format PUBLIC xla_ffi)

# The kernels are compiled once for each instruction set; cpu/dispatch.cc chooses at run time.
add_library(cgx_cpu STATIC xla_ffi/cpu/dispatch.cc xla_ffi/cpu/nonfinite.cc)
target_link_libraries(cgx_cpu PUBLIC cgx_format Threads::Threads)

function(add_isa name)
  add_library(cgx_cpu_${name} OBJECT xla_ffi/cpu/codes.cc xla_ffi/cpu/kernels.cc)
  target_include_directories(cgx_cpu_${name} PRIVATE xla_ffi)
  target_compile_definitions(cgx_cpu_${name} PRIVATE CGX_ISA=${name})
  target_compile_options(cgx_cpu_${name} PRIVATE ${ARGN})
  target_sources(cgx_cpu PRIVATE $<TARGET_OBJECTS:cgx_cpu_${name}>)
endfunction()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  add_isa(baseline)
  if(CGX_BASELINE_ONLY)
    target_compile_definitions(cgx_cpu PRIVATE CGX_BASELINE_ONLY)
  else()
    add_isa(avx2 -mavx2 -mfma)
    # GCC 12 warns about its own AVX-512 header, which reads a variable that is left uninitialized
    # on purpose.
    add_isa(avx512 -Wno-uninitialized -Wno-maybe-uninitialized -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  add_isa(neon)
else()
  message(FATAL_ERROR "cgx_jax supports x86-64 and aarch64, not ${CMAKE_SYSTEM_PROCESSOR}")
endif()

# The engine knows no MPI: it moves messages through the ports of a transport.
add_library(cgx_messages STATIC xla_ffi/messages/buffer_pool.cc xla_ffi/messages/engine.cc xla_ffi/messages/started.cc
                                xla_ffi/messages/fused.cc xla_ffi/messages/hello.cc
                                xla_ffi/messages/notices.cc xla_ffi/messages/rows.cc
                                xla_ffi/messages/transport.cc)
target_link_libraries(cgx_messages PUBLIC cgx_cpu)

add_library(cgx_mpi STATIC xla_ffi/mpi/library.cc)
target_link_libraries(cgx_mpi PUBLIC cgx_messages ${CMAKE_DL_LIBS})
