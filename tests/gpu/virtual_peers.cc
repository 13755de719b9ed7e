// N ranks on one GPU. The real kernel of the all-reduce over peers' memory is launched once per
// rank, all at once. The windows are memory of the one device, so no link takes part, or of the
// host, so that the device's link carries all.
//
//     virtual_peers WORLD VALUES REPEATS [device|host]
//
// Prints the same line as virtual_ranks.
#include "cuda/peer.h"
#include "virtual.h"

namespace {

void* pinned(size_t bytes) {
  void* memory;
  CGX_REQUIRE(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
  std::memset(memory, 0, bytes);
  return memory;
}

void* on_device(size_t bytes) {
  void* memory;
  CGX_REQUIRE(cudaMalloc(&memory, bytes));
  CGX_REQUIRE(cudaMemset(memory, 0, bytes));
  return memory;
}

// The windows: memory that all ranks may write.
class Windows {
 public:
  Windows(const cgx::Layout& layout, int world, bool in_host)
      : row_bytes_((layout.chunk_bytes + 127) / 128 * 128) {
    shape_.world = world;
    shape_.in_host = in_host;
    shape_.area_bytes = world * row_bytes_;
    cgx::WindowState state = {};
    for (int r = 0; r < world; ++r) {
      const auto make = in_host ? pinned : on_device;
      state.window[r] = static_cast<uint8_t*>(make(shape_.bytes()));
    }
    for (int r = 0; r < world; ++r) {
      states_.push_back(static_cast<cgx::WindowState*>(on_device(sizeof(state))));
      CGX_REQUIRE(cudaMemcpy(states_.back(), &state, sizeof(state), cudaMemcpyHostToDevice));
    }
    told_ = static_cast<uint32_t*>(pinned(sizeof(uint32_t)));
  }
  cgx::PeerArgs args(int rank, const Buffers& buffers, float divisor) const {
    constexpr int64_t kPatience = 5'000'000'000;
    const auto* const keys = static_cast<const uint32_t*>(buffers.keys);
    return {states_[rank], shape_, told_, keys, row_bytes_, kPatience, divisor, rank};
  }
  bool failed() const { return *const_cast<const volatile uint32_t*>(told_) != 0; }

 private:
  const int64_t row_bytes_;
  cgx::WindowShape shape_ = {};
  std::vector<cgx::WindowState*> states_;
  uint32_t* told_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  // Streams that share one of the device's queues wait for each other, and so would their kernels.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  Problem problem(argc > 1 ? std::atol(argv[1]) : 4, argc > 2 ? std::atol(argv[2]) : 1000003);
  const int world = static_cast<int>(problem.world);
  const int repeats = argc > 3 ? std::atoi(argv[3]) : 1;
  const std::string memory = argc > 4 ? argv[4] : "device";
  if (memory != "device" && memory != "host") fail("memory is " + memory + ": not device or host");
  CGX_REQUIRE(cudaSetDevice(0));
  CGX_REQUIRE(cgx::load_peer_kernels());
  const cgx::Layout layout = problem.owned.view();
  const Windows windows(layout, world, memory == "host");
  std::vector<Buffers> ranks;
  std::vector<std::vector<cgx::PeerTableInUnits>> tables(world);
  for (int r = 0; r < world; ++r) {
    const Buffers& rank = ranks.emplace_back(problem.inputs[r]);
    const void* const leaf = rank.in;
    void* const out = rank.out;
    const std::string error = cgx::peer_tables(layout, {&leaf, &Problem::kType},
                                               {&out, &Problem::kType}, {}, nullptr, &tables[r]);
    if (!error.empty()) fail(error);
  }
  CGX_REQUIRE(cudaDeviceSynchronize());
  std::vector<std::vector<float>> milliseconds(world);
  for (int i = 0; i < repeats; ++i) {
    for (int r = 0; r < world; ++r) {
      CGX_REQUIRE(cudaEventRecord(ranks[r].begin, ranks[r].stream));
      for (const cgx::PeerTableInUnits& table : tables[r]) {
        const cgx::PeerOptions options{/*residual=*/false, /*in_units=*/false, /*sharers=*/world};
        CGX_REQUIRE(cgx::launch_peer(table, windows.args(r, ranks[r], problem.divisor()), options,
                                     ranks[r].stream));
      }
      CGX_REQUIRE(cudaEventRecord(ranks[r].end, ranks[r].stream));
    }
    for (int r = 0; r < world; ++r) milliseconds[r].push_back(ranks[r].wait());
    if (windows.failed()) fail("a rank has waited 5 s for another");
  }
  for (int r = 0; r < world; ++r) ranks[r].copy_to(&problem.outputs[r]);
  return problem.report("\"exchange\": \"peer\", \"memory\": \"" + memory + "\"", milliseconds);
}
