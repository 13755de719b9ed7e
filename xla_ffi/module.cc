// The Python module cgx_jax._native.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <stdexcept>

#include "handlers_cpu.h"
#include "handlers_mpi.h"
#include "kernels_cpu.h"
#include "layout.h"
#include "timing.h"

namespace py = pybind11;

namespace {

std::map<std::string, py::capsule> handlers() {
  const auto capsule = [](auto* handler) {
    return py::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
  };
  return {{"cgx_encode", capsule(cgx::encode_handler)},
          {"cgx_reduce", capsule(cgx::reduce_handler)},
          {"cgx_decode", capsule(cgx::decode_handler)},
          {"cgx_accumulate", capsule(cgx::accumulate_handler)},
          {"cgx_all_reduce_mpi", capsule(cgx::all_reduce_mpi_handler)}};
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (auto table = cgx::available_kernels(); *table; ++table) names.push_back((*table)->isa);
  return names;
}

void set_isa(const std::string& name) {
  if (!cgx::select_kernels(name.c_str())) {
    throw py::value_error("isa '" + name + "' is not in isas()");
  }
}

cgx::OwnedLayout build(const std::vector<cgx::LeafSpec>& leaves, int64_t world) {
  cgx::OwnedLayout owned;
  const std::string error = owned.build(leaves, world);
  if (!error.empty()) throw py::value_error(error);
  return owned;
}

std::pair<std::vector<int64_t>, int64_t> layout(const std::vector<int64_t>& sizes,
                                                const std::vector<int64_t>& bits,
                                                const std::vector<int64_t>& bucket_sizes,
                                                int64_t world) {
  if (bits.size() != sizes.size() || bucket_sizes.size() != sizes.size()) {
    throw py::value_error("sizes, bits and bucket_sizes differ in length");
  }
  std::vector<cgx::LeafSpec> leaves;
  for (size_t k = 0; k < sizes.size(); ++k)
    leaves.push_back({sizes[k], bits[k], bucket_sizes[k], 0, 0});
  const cgx::OwnedLayout owned = build(leaves, world);
  const cgx::Layout view = owned.view();
  return {std::vector<int64_t>(view.begin, view.begin + world + 1), view.chunk_bytes};
}

// Sizes are checked here: the kernels trust their pointers.
double time_kernel(const std::string& kernel, py::array leaf, py::array out, py::array payload,
                   py::array chunk, const std::string& dtype, int64_t bits, int64_t bucket_size,
                   int64_t rounding, bool rotation, int64_t world, int64_t rank, float divisor,
                   int64_t threads, py::array_t<float> rows, py::array_t<float> columns) {
  const std::map<std::string, cgx::DType> dtypes = {
      {"f32", cgx::DType::kF32}, {"bf16", cgx::DType::kBF16}, {"f16", cgx::DType::kF16}};
  const auto found = dtypes.find(dtype);
  if (found == dtypes.end()) throw py::value_error("dtype must be f32, bf16 or f16");
  const int64_t size = leaf.nbytes() / cgx::item_size(found->second);
  const bool accumulate = kernel == "accumulate", reduce = kernel == "reduce";
  if (rows.size() / 2 * (columns.size() / 2) != (rows.size() ? size : 0)) {
    throw py::value_error("rows and columns do not fit the leaf");
  }
  const cgx::LeafUnits units{rows.data(), columns.data(), rows.size() / 2, columns.size() / 2};
  const cgx::LeafSpec leaf_spec{size, bits, bucket_size, rounding, 0, rotation, rows.size() > 0};
  const cgx::OwnedLayout owned = build({leaf_spec}, accumulate ? 1 : world);
  const int64_t row = owned.view().chunk_bytes;
  if (payload.nbytes() != world * row || (reduce && chunk.nbytes() != row) ||
      (out.nbytes() != leaf.nbytes() && (out.nbytes() != 0 || kernel == "decode" || accumulate)) ||
      (rank < 0 && reduce) || rank >= world || threads < 1) {
    throw py::value_error("buffer sizes, rank or threads do not fit the layout");
  }
  const cgx::Timed timed{leaf_spec,
                         found->second,
                         leaf.data(),
                         out.nbytes() ? out.mutable_data() : nullptr,
                         static_cast<uint8_t*>(payload.mutable_data()),
                         static_cast<uint8_t*>(chunk.mutable_data()),
                         world,
                         rank,
                         {1, 2},
                         divisor,
                         units};
  const py::gil_scoped_release unlocked;
  return cgx::time_kernel(kernel, timed, owned, threads);
}

double time_copy(py::array to, py::array from, int64_t threads) {
  if (to.nbytes() != from.nbytes() || threads < 1) throw py::value_error("sizes differ");
  void* const target = to.mutable_data();
  const void* const source = from.data();
  const int64_t bytes = from.nbytes();
  const py::gil_scoped_release unlocked;
  return cgx::time_copy(target, source, bytes, threads);
}

void mpi_start(const std::string& module, int64_t handle_bytes, int64_t status_bytes,
               uint64_t communicator, uint64_t byte_type, uint64_t null_request,
               int64_t largest_tag, int64_t rank, int64_t segment_bytes, int64_t window,
               double timeout, int64_t threads) {
  std::string error;
  auto library = cgx::bind_mpi(
      {module, handle_bytes, status_bytes, communicator, byte_type, null_request, largest_tag},
      &error);
  if (!library) throw py::value_error(error);
  const py::gil_scoped_release unlocked;
  const cgx::EngineSettings settings{rank, largest_tag, {segment_bytes, window}, timeout, threads};
  cgx::set_engine(std::make_unique<cgx::Engine>(std::move(library), settings));
}

void mpi_stop() {
  const py::gil_scoped_release unlocked;
  cgx::set_engine(nullptr);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "CPU kernels of cgx_jax as XLA FFI handlers.";
  m.def("handlers", &handlers, "FFI targets for jax.ffi.register_ffi_target(platform='cpu').");
  m.def("isa", [] { return cgx::current_kernels().isa; }, "Instruction set in use.");
  m.def("isas", &isas, "Instruction sets compiled in and supported here, best first.");
  m.def("set_isa", &set_isa, py::arg("name"), "Chooses one of isas(), for tests and benchmarks.");
  m.def("wire_version", [] { return cgx::kWireVersion; }, "Version of the wire format.");
  m.def("layout", &layout, py::arg("sizes"), py::arg("bits"), py::arg("bucket_sizes"),
        py::arg("world"), "Chunk starts (world + 1) and the length of a payload row, in bytes.");
  m.def("time_kernel", &time_kernel, py::arg("kernel"), py::arg("leaf"), py::arg("out"),
        py::arg("payload"), py::arg("chunk"), py::arg("dtype") = "f32", py::kw_only(),
        py::arg("bits"), py::arg("bucket_size") = 512, py::arg("rounding") = 0,
        py::arg("rotation") = false, py::arg("world") = 1, py::arg("rank") = -1,
        py::arg("divisor") = 1.0f, py::arg("threads") = 1, py::arg("rows") = py::array_t<float>(),
        py::arg("columns") = py::array_t<float>(),
        "Runs one kernel on NumPy buffers with key (1, 2), stream 0; returns its seconds.");
  m.def("time_copy", &time_copy, py::arg("to"), py::arg("source"), py::arg("threads") = 1,
        "Copies a NumPy buffer with memcpy; returns its seconds.");
  m.def("mpi_libraries", &cgx::loaded_mpi_libraries,
        "Shared objects of this process that define MPI.");
  m.def("mpi_start", &mpi_start, py::kw_only(), py::arg("module"), py::arg("handle_bytes"),
        py::arg("status_bytes"), py::arg("communicator"), py::arg("byte_type"),
        py::arg("null_request"), py::arg("largest_tag"), py::arg("rank"), py::arg("segment_bytes"),
        py::arg("window"), py::arg("timeout"), py::arg("threads"),
        "Binds the MPI library that `module` links to and starts the engine of fused calls.");
  m.def("mpi_stop", &mpi_stop, "Ends the engine; calls in flight fail.");
  m.def("mpi_failure", &cgx::engine_failure, "What has made a fused call fail; '' when nothing.");
}
