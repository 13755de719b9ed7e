// The Python module cgx_jax._native.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <stdlib.h>
#if defined(__GLIBC__)
#include <malloc.h>
#include <unistd.h>
#endif

#include <map>

#include "cpu/kernels.h"
#include "cpu/pages.h"
#include "format/layout.h"
#include "handlers/handlers.h"
#include "handlers/mpi.h"
#include "handlers/report.h"
#include "mpi/library.h"

namespace py = pybind11;

namespace {

std::map<std::string, py::capsule> handlers() {
  const auto capsule = [](auto* handler) {
    return py::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
  };
  std::map<std::string, py::capsule> all = {{"cgx_report", capsule(cgx::report_handler)}};
  for (const auto& handlers : {cgx::cpu_handlers(), cgx::mpi_handlers()}) {
    for (const cgx::Handler& h : handlers) all.emplace(h.target, capsule(h.call));
  }
  return all;
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

std::pair<std::vector<int64_t>, int64_t> layout(const std::vector<int64_t>& sizes,
                                                const std::vector<int64_t>& bits,
                                                const std::vector<int64_t>& bucket_sizes,
                                                int64_t world) {
  if (bits.size() != sizes.size() || bucket_sizes.size() != sizes.size()) {
    throw py::value_error("sizes, bits and bucket_sizes differ in length");
  }
  std::vector<cgx::SlotSpec> leaves;
  for (size_t k = 0; k < sizes.size(); ++k)
    leaves.push_back({sizes[k], bits[k], bucket_sizes[k], 0, 0});
  cgx::OwnedLayout owned;
  const std::string error = owned.build(leaves, world);
  if (!error.empty()) throw py::value_error(error);
  const cgx::Layout view = owned.view();
  return {std::vector<int64_t>(view.begin, view.begin + world + 1), view.chunk_bytes};
}

void mpi_start(const std::string& module, int64_t handle_bytes, int64_t status_bytes,
               uint64_t communicator, uint64_t byte_type, uint64_t null_request,
               int64_t largest_tag, int64_t error_offset, int64_t ranks, int64_t rank,
               int64_t segment_bytes, int64_t window, double timeout, int64_t threads) {
  std::string error;
  auto ports = cgx::bind_mpi(
      {module, handle_bytes, status_bytes, communicator, byte_type, null_request, error_offset},
      &error);
  if (!ports) throw py::value_error(error);
  const py::gil_scoped_release unlocked;
  const cgx::EngineSettings settings{ranks,   rank,   largest_tag, {segment_bytes, window},
                                     timeout, threads};
  cgx::set_engine(std::make_unique<cgx::Engine>(std::move(ports), settings));
}

void mpi_stop() {
  const py::gil_scoped_release unlocked;
  cgx::set_engine(nullptr);
}

// Sends reports to `listener`. It returns the error that the reporting call fails with, or "".
void set_listener(py::function listener) {
  // Never released: programs may report until the process ends.
  const PyObject* const kept = listener.release().ptr();
  cgx::set_listener([kept](const cgx::Report& report) -> std::string {
    const py::gil_scoped_acquire locked;
    const auto numbers = [](const int32_t* data, int64_t size) {
      return py::array_t<int32_t>(size, data);
    };
    try {
      const py::handle call(const_cast<PyObject*>(kept));
      return py::cast<std::string>(
          call(py::str(report.text.data(), report.text.size()), numbers(report.steps, report.batch),
               numbers(report.ranks, report.batch), numbers(report.table, report.size)));
    } catch (const std::exception& error) {  // the listener's own mistake
      return error.what();
    }
  });
}

// Makes malloc keep freed memory, in huge pages, instead of returning it to the system. Returns
// whether that worked.
bool keep_memory() {
#if defined(__GLIBC__)
  // Per-thread heaps are returned to the system whatever the options, so all threads use the main
  // heap.
  constexpr int kNever = -1;
  if (mallopt(M_ARENA_MAX, 1) != 1 || mallopt(M_MMAP_MAX, 0) != 1 ||
      mallopt(M_TRIM_THRESHOLD, kNever) != 1) {
    return false;
  }
  // The heap grows at once to half of the physical memory. This takes only address space: the
  // system provides pages only for memory that is written.
  const int64_t bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE) / 2;
  void* const reserve = malloc(static_cast<size_t>(bytes));
  if (!reserve) return false;
  cgx::prefer_huge_pages(reserve, bytes);
  free(reserve);
  return true;
#else
  return false;
#endif
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "CPU kernels of cgx_jax as XLA FFI handlers.";
  m.def("handlers", &handlers, "FFI targets for jax.ffi.register_ffi_target(platform='cpu').");
  m.def("isa", [] { return cgx::current_kernels().isa; }, "Instruction set in use.");
  m.def("isas", &isas, "Instruction sets compiled in and supported here, best first.");
  m.def("set_isa", &set_isa, py::arg("name"), "Chooses one of isas(), for tests and benchmarks.");
  m.def("constants", &cgx::constants, "Numbers that Python must agree on, by name.");
  m.def("keep_memory", &keep_memory,
        "Whether malloc keeps from now on what is freed, in huge pages.");
  m.def("set_listener", &set_listener, py::arg("listener"),
        "Who is told of values that are not finite: (text, steps, ranks, table) -> error.");
  m.def("layout", &layout, py::arg("sizes"), py::arg("bits"), py::arg("bucket_sizes"),
        py::arg("world"), "Chunk starts (world + 1) and the length of a payload row, in bytes.");
  m.def("mpi_libraries", &cgx::loaded_mpi_libraries,
        "Shared objects of this process that define MPI.");
  m.def("mpi_start", &mpi_start, py::kw_only(), py::arg("module"), py::arg("handle_bytes"),
        py::arg("status_bytes"), py::arg("communicator"), py::arg("byte_type"),
        py::arg("null_request"), py::arg("largest_tag"), py::arg("error_offset"), py::arg("ranks"),
        py::arg("rank"), py::arg("segment_bytes"), py::arg("window"), py::arg("timeout"),
        py::arg("threads"),
        "Binds the MPI library that `module` links to and starts the engine of its calls.");
  m.def("mpi_stop", &mpi_stop, "Ends the engine; calls in flight have a moment to end.");
  m.def("mpi_failure", &cgx::engine_failure, "What has made a call fail; '' when nothing.");
}
