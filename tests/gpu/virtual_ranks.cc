// N ranks in one process on one GPU. Runs the real kernels, streams, events and schedule of the
// fused all-reduce, or of its form in one phase. Only NCCL's calls are replaced, by copies within
// the device.
//
//     virtual_ranks WORLD VALUES SEGMENT_BYTES REPEATS [STREAMS] [all_reduce | gather_sum]
//
// Prints one line of JSON: whether all ranks hold the same bytes, whether these equal the bytes of
// the same steps on the CPU, and the median milliseconds of a call with all ranks at work.
// compute-sanitizer runs this program too.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "nccl/fused.h"
#include "virtual.h"

namespace {

cudaEvent_t new_event() {
  cudaEvent_t event;
  CGX_REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

// Messages between threads. As in NCCL, the receiver copies when the sender's stream is ready, and
// the sender's stream continues when the copy is done.
class Mailbox {
 public:
  struct Sent {
    const void* data;
    size_t bytes;
    cudaEvent_t ready, copied;
    bool taken = false;
  };
  using Key = std::tuple<int, int, int64_t>;  // from, to, number

  std::shared_ptr<Sent> put(const Key& key, const void* data, size_t bytes, cudaStream_t stream) {
    auto sent = std::make_shared<Sent>(Sent{data, bytes, new_event(), new_event()});
    CGX_REQUIRE(cudaEventRecord(sent->ready, stream));
    const std::lock_guard<std::mutex> lock(mutex_);
    box_[key] = sent;
    changed_.notify_all();
    return sent;
  }
  void take(const Key& key, void* to, size_t bytes, cudaStream_t stream) {
    std::shared_ptr<Sent> sent;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return box_.count(key) > 0; });
      sent = box_[key];
      box_.erase(key);
    }
    if (sent->bytes != bytes) {
      std::fprintf(stderr, "virtual_ranks: %zu bytes sent, %zu expected\n", sent->bytes, bytes);
      std::exit(3);
    }
    CGX_REQUIRE(cudaStreamWaitEvent(stream, sent->ready, 0));
    CGX_REQUIRE(cudaMemcpyAsync(to, sent->data, bytes, cudaMemcpyDeviceToDevice, stream));
    CGX_REQUIRE(cudaEventRecord(sent->copied, stream));
    const std::lock_guard<std::mutex> lock(mutex_);
    sent->taken = true;
    changed_.notify_all();
  }
  void finish(const std::shared_ptr<Sent>& sent, cudaStream_t stream) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return sent->taken; });
    }
    CGX_REQUIRE(cudaStreamWaitEvent(stream, sent->copied, 0));
    CGX_REQUIRE(cudaEventDestroy(sent->ready));
    CGX_REQUIRE(cudaEventDestroy(sent->copied));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, std::shared_ptr<Sent>> box_;
};

Mailbox mailbox;

struct Message {
  bool sends;
  void* data;
  size_t bytes;
  int peer;
  cudaStream_t stream;
};
struct Rank {
  int number;
  std::vector<Message> group;
  std::map<int, int64_t> sent, received;
};
thread_local Rank* self;

int end_group() {
  std::vector<std::shared_ptr<Mailbox::Sent>> sent;
  cudaStream_t stream = nullptr;
  for (const Message& m : self->group) {
    stream = m.stream;
    if (!m.sends) continue;
    sent.push_back(
        mailbox.put({self->number, m.peer, self->sent[m.peer]++}, m.data, m.bytes, stream));
  }
  for (const Message& m : self->group) {
    if (m.sends) continue;
    mailbox.take({m.peer, self->number, self->received[m.peer]++}, m.data, m.bytes, stream);
  }
  for (const auto& s : sent) mailbox.finish(s, stream);
  self->group.clear();
  return cgx::NcclLibrary::kSuccess;
}

cgx::NcclLibrary copies() {
  cgx::NcclLibrary library = {};
  library.get_error_string = [](int) { return "error"; };
  library.group_start = [] { return cgx::NcclLibrary::kSuccess; };
  library.group_end = end_group;
  library.send = [](const void* data, size_t bytes, int, int peer, cgx::NcclComm,
                    cudaStream_t stream) {
    self->group.push_back({true, const_cast<void*>(data), bytes, peer, stream});
    return cgx::NcclLibrary::kSuccess;
  };
  library.recv = [](void* data, size_t bytes, int, int peer, cgx::NcclComm, cudaStream_t stream) {
    self->group.push_back({false, data, bytes, peer, stream});
    return cgx::NcclLibrary::kSuccess;
  };
  // Sends and receives between two ranks match by number, whatever communicator they are on.
  library.comm_split = [](cgx::NcclComm from, int, int, cgx::NcclComm* made, cgx::NcclConfig*) {
    *made = from;
    return cgx::NcclLibrary::kSuccess;
  };
  library.op_create = [](int*, void*, int, int, cgx::NcclComm) {
    return cgx::NcclLibrary::kSuccess;
  };
  library.op_destroy = [](int, cgx::NcclComm) { return cgx::NcclLibrary::kSuccess; };
  return library;
}

}  // namespace

int main(int argc, char** argv) {
  const bool one_phase = argc > 6 && std::strcmp(argv[6], "gather_sum") == 0;
  Problem problem(argc > 1 ? std::atol(argv[1]) : 4, argc > 2 ? std::atol(argv[2]) : 1000003,
                  one_phase);
  const int64_t segment_bytes = argc > 3 ? std::atol(argv[3]) : 1 << 20;
  const int repeats = argc > 4 ? std::atoi(argv[4]) : 1;
  const int64_t streams = argc > 5 ? std::atol(argv[5]) : 1;
  const auto collective = one_phase ? cgx::Collective::kGatherSum : cgx::Collective::kAllReduce;
  const cgx::Layout layout = problem.owned.view();
  const int64_t bytes = cgx::CudaFused::scratch_bytes(collective, layout, segment_bytes);
  const cgx::NcclLibrary library = copies();
  std::vector<std::vector<float>> milliseconds(problem.world);
  const auto work = [&](int number) {
    Rank rank{number, {}, {}, {}};
    self = &rank;
    CGX_REQUIRE(cudaSetDevice(0));
    const Buffers buffers(problem.inputs[number]);
    void* scratch;
    CGX_REQUIRE(cudaMalloc(&scratch, bytes));
    CGX_REQUIRE(cudaMemset(scratch, 0xCD, bytes));
    const auto check = [&](const std::string& error) {
      if (!error.empty()) fail("rank " + std::to_string(number) + ": " + error);
    };
    cgx::CudaLane lane;
    check(lane.prepare(cgx::CudaFused::segments(layout, segment_bytes)));
    check(lane.connect(streams, library, nullptr, number, problem.world));
    for (int i = 0; i < repeats; ++i) {
      const std::vector<const void*> leaves(problem.types.size(), buffers.in);
      const std::vector<void*> out(problem.types.size(), buffers.out);
      CGX_REQUIRE(cudaEventRecord(buffers.begin, buffers.stream));
      cgx::CudaFused fused({collective,
                            layout,
                            {leaves.data(), problem.types.data()},
                            {out.data(), problem.types.data()},
                            {},
                            static_cast<const uint32_t*>(buffers.keys),
                            problem.divisor(),
                            number,
                            segment_bytes,
                            streams,
                            static_cast<uint8_t*>(scratch)},
                           library, nullptr, lane, buffers.stream);
      check(fused.run());
      CGX_REQUIRE(cudaEventRecord(buffers.end, buffers.stream));
      milliseconds[number].push_back(buffers.wait());
    }
    buffers.copy_to(&problem.outputs[number]);
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < problem.world; ++r) threads.emplace_back(work, r);
  for (auto& thread : threads) thread.join();
  return problem.report("\"segment_bytes\": " + std::to_string(segment_bytes) + ", \"streams\": " +
                            std::to_string(streams) + ", \"phases\": " + (one_phase ? "1" : "2"),
                        milliseconds);
}
