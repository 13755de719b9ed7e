// N ranks on one GPU. The real kernel of the all-reduce over peers' memory is launched once per
// rank, all at once. The windows are memory of the one device, so no link takes part.
//
//     virtual_peers WORLD VALUES REPEATS
//
// Prints the same line as virtual_ranks.
#include "cuda/peer.h"
#include "virtual.h"

namespace {

// The windows: memory that all ranks may write. Each window holds the addresses of all windows.
class Windows {
 public:
  Windows(const cgx::Layout& layout, int world)
      : row_bytes_((layout.chunk_bytes + 127) / 128 * 128), memory_(world) {
    shape_.world = world;
    shape_.area_bytes = world * row_bytes_;
    for (auto& window : memory_) {
      CGX_REQUIRE(cudaMalloc(reinterpret_cast<void**>(&window), shape_.bytes()));
      CGX_REQUIRE(cudaMemset(window, 0, shape_.rows()));
    }
    for (uint8_t* window : memory_) {
      CGX_REQUIRE(
          cudaMemcpy(window, memory_.data(), world * sizeof(uint8_t*), cudaMemcpyHostToDevice));
    }
    CGX_REQUIRE(cudaHostAlloc(reinterpret_cast<void**>(&told_), sizeof(uint32_t),
                              cudaHostAllocPortable | cudaHostAllocMapped));
    *told_ = 0;
  }
  cgx::PeerArgs args(int rank, const Buffers& buffers, float divisor) const {
    constexpr int64_t kPatience = 5'000'000'000;
    const auto* const keys = static_cast<const uint32_t*>(buffers.keys);
    return {memory_[rank], shape_, told_, keys, row_bytes_, kPatience, divisor, rank};
  }
  bool failed() const { return *const_cast<const volatile uint32_t*>(told_) != 0; }

 private:
  const int64_t row_bytes_;
  cgx::WindowShape shape_ = {};
  std::vector<uint8_t*> memory_;
  uint32_t* told_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  // Streams that share one of the device's queues wait for each other, and so would their kernels.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  Problem problem(argc > 1 ? std::atol(argv[1]) : 4, argc > 2 ? std::atol(argv[2]) : 1000003);
  const int world = static_cast<int>(problem.world);
  const int repeats = argc > 3 ? std::atoi(argv[3]) : 1;
  CGX_REQUIRE(cudaSetDevice(0));
  CGX_REQUIRE(cgx::load_peer_kernels());
  const cgx::Layout layout = problem.owned.view();
  const Windows windows(layout, world);
  std::vector<Buffers> ranks;
  std::vector<std::vector<cgx::PeerTable>> tables(world);
  for (int r = 0; r < world; ++r) {
    const Buffers& rank = ranks.emplace_back(problem.inputs[r]);
    const void* const leaf = rank.in;
    void* const out = rank.out;
    const std::string error =
        cgx::peer_tables(layout, {&leaf, &Problem::kType}, {&out, &Problem::kType}, {}, &tables[r]);
    if (!error.empty()) fail(error);
  }
  CGX_REQUIRE(cudaDeviceSynchronize());
  std::vector<std::vector<float>> milliseconds(world);
  for (int i = 0; i < repeats; ++i) {
    for (int r = 0; r < world; ++r) {
      CGX_REQUIRE(cudaEventRecord(ranks[r].begin, ranks[r].stream));
      for (const cgx::PeerTable& table : tables[r]) {
        CGX_REQUIRE(cgx::launch_peer(table, windows.args(r, ranks[r], problem.divisor()),
                                     /*residual=*/false, ranks[r].stream, /*sharers=*/world));
      }
      CGX_REQUIRE(cudaEventRecord(ranks[r].end, ranks[r].stream));
    }
    for (int r = 0; r < world; ++r) milliseconds[r].push_back(ranks[r].wait());
    if (windows.failed()) fail("a rank has waited 5 s for another");
  }
  for (int r = 0; r < world; ++r) ranks[r].copy_to(&problem.outputs[r]);
  return problem.report("\"exchange\": \"peer\"", milliseconds);
}
