// The Python module cgx_jax._cuda. It loads on machines without a GPU and without a driver: the
// CUDA runtime inside opens the driver at its first call.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "cuda/codes.h"
#include "cuda/peer.h"
#include "handlers/handlers.h"
#include "handlers/nccl.h"
#include "nccl/fused.h"
#include "nccl/library.h"

namespace py = pybind11;

namespace {

py::dict handlers() {
  const auto capsule = [](auto* handler) {
    return py::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
  };
  py::dict all;
  for (const cgx::Handler& h : cgx::cuda_handlers()) all[h.target] = capsule(h.call);
#if CGX_HAVE_COLLECTIVES
  const auto with_communicator = [&](cgx::Stages stages) {
    py::dict staged;
    staged["prepare"] = capsule(cgx::nccl_prepare);
    staged["initialize"] = capsule(stages.initialize);
    staged["execute"] = capsule(stages.execute);
    return staged;
  };
  using cgx::Collective;
  const auto on_nccl = [&](Collective c) { return with_communicator(cgx::nccl_stages(c)); };
  all["cgx_all_reduce_nccl"] = on_nccl(Collective::kAllReduce);
  all["cgx_reduce_scatter_nccl"] = on_nccl(Collective::kReduceScatter);
  all["cgx_all_gather_nccl"] = on_nccl(Collective::kAllGather);
  all["cgx_gather_sum_nccl"] = on_nccl(Collective::kGatherSum);
  all["cgx_all_reduce_peer"] = with_communicator(cgx::peer_stages());
#endif
  return all;
}

std::string nccl_version() {
  std::string error;
  const cgx::NcclLibrary* const nccl = cgx::nccl_library(&error);
  int version = 0;
  if (!nccl || nccl->get_version(&version) != cgx::NcclLibrary::kSuccess) return "";
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

int driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

std::map<std::string, int64_t> constants() {
  std::map<std::string, int64_t> all = cgx::constants();
  all.insert({{"shortest_bucket", cgx::kShortestBucket},
              {"longest_in_units", cgx::kTileValues},
              {"scratch_words", cgx::kScratchWords},
              {"alignment", cgx::CudaFused::kAlignment},
              {"most_streams", cgx::kMostStreams},
              {"most_peers", cgx::kMaxPeers}});
  return all;
}

}  // namespace

PYBIND11_MODULE(cgx_jax_cuda13, m) {
  m.doc() = "CUDA kernels of cgx_jax as XLA FFI handlers.";
  m.def("handlers", &handlers, "FFI targets for jax.ffi.register_ffi_target(platform='CUDA').");
  m.def("architectures", [] { return CGX_CUDA_ARCHITECTURES; }, "What the kernels are built for.");
  m.def("driver_version", &driver_version, "As 13000 for CUDA 13.0; 0 without a driver.");
  m.def("nccl_version", &nccl_version, "Version of the NCCL that XLA uses here; '' without one.");
  m.def("constants", &constants, "Numbers that Python must agree on, by name.");
}
