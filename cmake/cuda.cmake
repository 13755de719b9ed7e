# The optional module of CUDA kernels. nvcc is the one that CUDACXX names, else the one on PATH,
# else the one of PyPI's nvidia-cuda-nvcc in the environment of the build.
if(Python_EXECUTABLE)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u; print(u.find_spec('nvidia').submodule_search_locations[0])"
    OUTPUT_VARIABLE nvidia_wheels OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(DEFINED ENV{CUDACXX})
  set(nvcc_name "$ENV{CUDACXX}")
else()
  set(nvcc_name nvcc)
endif()
find_program(CMAKE_CUDA_COMPILER NAMES "${nvcc_name}" PATHS "${nvidia_wheels}/cu13/bin"
             NO_CMAKE_SYSTEM_PATH)
string(CONCAT cuda_remedy
       "install the CUDA toolkit, 13 or newer, and put its nvcc on PATH or name it in CUDACXX, or "
       "pip install nvidia-cuda-nvcc nvidia-cuda-runtime and build with --no-build-isolation, or "
       "build without CUDA kernels by -C cgx.native=on")
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "cgx_jax: CUDA kernels were asked for, and there is no ${nvcc_name}: "
                      "${cuda_remedy}")
endif()

# An older nvcc does not know the newest architectures.
execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE nvcc_version ERROR_QUIET)
if(NOT nvcc_version MATCHES "release ([0-9.]+)")
  message(FATAL_ERROR "cgx_jax: ${CMAKE_CUDA_COMPILER} --version names no release of CUDA: "
                      "${cuda_remedy}")
elseif(CMAKE_MATCH_1 VERSION_LESS 13)
  message(FATAL_ERROR "cgx_jax: ${CMAKE_CUDA_COMPILER} is of CUDA ${CMAKE_MATCH_1}, older than 13: "
                      "${cuda_remedy}")
endif()

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90-real 100-real 120)
endif()
set(CMAKE_CUDA_STANDARD 17)
enable_language(CUDA)
message(STATUS "cgx_jax: CUDA kernels by nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")

# nvcc sees no XLA header. It contracts nothing, so that the bytes equal the CPU's.
add_library(cgx_cuda STATIC xla_ffi/cuda/codec.cc xla_ffi/cuda/codes.cu xla_ffi/cuda/kernels.cu
                            xla_ffi/cuda/peer.cu xla_ffi/cuda/peer_tables.cc xla_ffi/cuda/select.cu
                            xla_ffi/nccl/fused.cc xla_ffi/nccl/lane.cc xla_ffi/nccl/library.cc xla_ffi/nccl/peer.cc
                            xla_ffi/nccl/shared_memory.cc)
target_include_directories(cgx_cuda SYSTEM PUBLIC ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_compile_options(cgx_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false --threads=0>)
# rt has shm_open before glibc 2.34.
target_link_libraries(cgx_cuda PUBLIC cgx_format ${CMAKE_DL_LIBS} rt)
set_target_properties(cgx_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static)

if(CGX_BUILD_GPU_TESTS)
  foreach(program kernel_bench virtual_ranks virtual_peers)
    add_executable(${program} tests/gpu/${program}.cc)
    set_target_properties(${program} PROPERTIES CUDA_RUNTIME_LIBRARY Static LINKER_LANGUAGE CUDA)
    target_link_libraries(${program} PRIVATE cgx_cuda cgx_cpu)
  endforeach()
endif()
if(NOT CGX_BUILD_MODULE)
  return()
endif()

# The module is at the top level, as in the package cgx-jax-cuda13.
pybind11_add_module(cgx_jax_cuda13 MODULE xla_ffi/handlers/module_cuda.cc
                    xla_ffi/handlers/cuda.cc xla_ffi/handlers/nccl.cc)
set_target_properties(cgx_jax_cuda13 PROPERTIES CUDA_RUNTIME_LIBRARY Static)
string(REPLACE ";" " " architectures "${CMAKE_CUDA_ARCHITECTURES}")
target_compile_definitions(cgx_jax_cuda13 PRIVATE CGX_CUDA_ARCHITECTURES="${architectures}")
target_include_directories(cgx_jax_cuda13 SYSTEM PRIVATE "${jaxlib_include}")
target_link_libraries(cgx_jax_cuda13 PRIVATE cgx_cuda)
install(TARGETS cgx_jax_cuda13 DESTINATION .)
