// N ranks in one process on one GPU: the kernels, streams, events and schedule of the fused
// all-reduce as they are; only NCCL's calls are replaced, by copies within the device.
//
//     virtual_ranks WORLD VALUES SEGMENT_BYTES REPEATS
//
// Prints one line of JSON: whether all ranks hold the same bytes, whether those are the bytes of
// the same steps on the CPU, and the median milliseconds of a call with all ranks at work. Also
// what compute-sanitizer runs.
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

#include "cpu/kernels.h"
#include "format/layout.h"
#include "nccl/fused.h"

namespace {

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "virtual_ranks: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#define CGX_REQUIRE(call) require((call), #call)

cudaEvent_t new_event() {
  cudaEvent_t event;
  CGX_REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

// Messages between threads. The receiver copies when the sender's stream is ready, and the sender's
// stream goes on when the copy is done, as in NCCL.
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
  return library;
}

using Values = std::vector<float>;

// The same steps one after the other on the CPU.
Values on_cpu(const cgx::Layout& layout, int64_t longest, const std::vector<Values>& inputs,
              const uint32_t* keys, float divisor) {
  const cgx::KernelTable& cpu = cgx::current_kernels();
  const cgx::DType dtype = cgx::DType::kF32;
  const int64_t world = layout.world, row = layout.chunk_bytes;
  std::vector<std::vector<uint8_t>> sent(world, std::vector<uint8_t>(world * row));
  std::vector<float> scratch(longest);
  for (int64_t r = 0; r < world; ++r) {
    const void* in = inputs[r].data();
    cpu.encode({layout, {&in, &dtype}, {}, keys, r, sent[r].data(), scratch.data()}, 0,
               layout.total_bytes());
  }
  std::vector<uint8_t> gathered(world * row), received(world * row);
  for (int64_t r = 0; r < world; ++r) {
    for (int64_t p = 0; p < world; ++p) {
      std::memcpy(received.data() + p * row, sent[p].data() + r * row, row);
    }
    const void* in = inputs[r].data();
    cpu.reduce({layout,
                {&in, &dtype},
                keys + 2,
                r,
                received.data(),
                divisor,
                gathered.data() + r * row,
                scratch.data(),
                {}},
               layout.begin[r], layout.begin[r + 1]);
  }
  Values result(inputs[0].size());
  void* out = result.data();
  cpu.decode({layout, gathered.data(), {&out, &dtype}, scratch.data()}, 0, layout.total_bytes());
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t world = argc > 1 ? std::atol(argv[1]) : 4;
  const int64_t count = argc > 2 ? std::atol(argv[2]) : 1000003;
  const int64_t segment_bytes = argc > 3 ? std::atol(argv[3]) : 1 << 20;
  const int repeats = argc > 4 ? std::atoi(argv[4]) : 1;
  const uint32_t keys[4] = {1, 2, 3, 4};
  const cgx::DType dtype = cgx::DType::kF32;
  constexpr cgx::Collective collective = cgx::Collective::kAllReduce;
  cgx::OwnedLayout owned;
  const std::string error = owned.build({{count, 4, 512, 0, 0}}, world);
  if (!error.empty()) {
    std::fprintf(stderr, "virtual_ranks: %s\n", error.c_str());
    return 2;
  }
  const cgx::Layout layout = owned.view();
  const int64_t bytes = cgx::CudaFused::scratch_bytes(collective, layout, segment_bytes);
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<Values> inputs(world, Values(count)), outputs(world, Values(count));
  for (auto& rank : inputs) {
    for (float& x : rank) x = normal(rng);
  }
  const cgx::NcclLibrary library = copies();
  std::vector<std::vector<float>> milliseconds(world);
  const auto work = [&](int number) {
    Rank rank{number, {}, {}, {}};
    self = &rank;
    CGX_REQUIRE(cudaSetDevice(0));
    void *in, *out, *scratch, *device_keys;
    CGX_REQUIRE(cudaMalloc(&in, count * 4));
    CGX_REQUIRE(cudaMalloc(&out, count * 4));
    CGX_REQUIRE(cudaMalloc(&scratch, bytes));
    CGX_REQUIRE(cudaMalloc(&device_keys, sizeof(keys)));
    CGX_REQUIRE(cudaMemset(out, 0xFF, count * 4));
    CGX_REQUIRE(cudaMemset(scratch, 0xCD, bytes));
    CGX_REQUIRE(cudaMemcpy(in, inputs[number].data(), count * 4, cudaMemcpyHostToDevice));
    CGX_REQUIRE(cudaMemcpy(device_keys, keys, sizeof(keys), cudaMemcpyHostToDevice));
    cudaStream_t stream;
    CGX_REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaEvent_t begin, end;
    CGX_REQUIRE(cudaEventCreate(&begin));
    CGX_REQUIRE(cudaEventCreate(&end));
    cgx::CudaLane lane;
    if (const std::string failed = lane.prepare(cgx::CudaFused::segments(layout, segment_bytes));
        !failed.empty()) {
      std::fprintf(stderr, "virtual_ranks: rank %d: %s\n", number, failed.c_str());
      std::exit(4);
    }
    for (int i = 0; i < repeats; ++i) {
      const void* const leaf = in;
      CGX_REQUIRE(cudaEventRecord(begin, stream));
      cgx::CudaFused fused({collective,
                            layout,
                            {&leaf, &dtype},
                            {&out, &dtype},
                            {},
                            static_cast<const uint32_t*>(device_keys),
                            static_cast<float>(world),
                            number,
                            segment_bytes,
                            static_cast<uint8_t*>(scratch)},
                           library, nullptr, lane, stream);
      if (const std::string failed = fused.run(); !failed.empty()) {
        std::fprintf(stderr, "virtual_ranks: rank %d: %s\n", number, failed.c_str());
        std::exit(4);
      }
      CGX_REQUIRE(cudaEventRecord(end, stream));
      CGX_REQUIRE(cudaStreamSynchronize(stream));
      float took;
      CGX_REQUIRE(cudaEventElapsedTime(&took, begin, end));
      milliseconds[number].push_back(took);
    }
    CGX_REQUIRE(cudaMemcpy(outputs[number].data(), out, count * 4, cudaMemcpyDeviceToHost));
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) threads.emplace_back(work, r);
  for (auto& thread : threads) thread.join();

  const Values expected =
      on_cpu(layout, owned.longest_bucket(), inputs, keys, static_cast<float>(world));
  bool agree = true;
  for (const auto& out : outputs)
    agree &= std::memcmp(out.data(), outputs[0].data(), count * 4) == 0;
  const bool right = std::memcmp(outputs[0].data(), expected.data(), count * 4) == 0;
  std::vector<float> slowest(repeats);
  for (int i = 0; i < repeats; ++i) {
    for (const auto& rank : milliseconds) slowest[i] = std::max(slowest[i], rank[i]);
  }
  std::nth_element(slowest.begin(), slowest.begin() + repeats / 2, slowest.end());
  std::printf(
      "{\"world\": %ld, \"values\": %ld, \"segment_bytes\": %ld, \"ranks_agree\": %s, "
      "\"equals_cpu\": %s, \"milliseconds\": %.4f}\n",
      static_cast<long>(world), static_cast<long>(count), static_cast<long>(segment_bytes),
      agree ? "true" : "false", right ? "true" : "false", slowest[repeats / 2]);
  return agree && right ? 0 : 1;
}
