// The CUDA kernels on one GPU: compares their bytes with the CPU's and their time with a copy's.
//
//     kernel_bench [--values 134217728] [--repeats 15] [--only SUBSTRING] [--seconds 200]
//
// Prints one line of JSON per case as soon as it is known, the most important cases first. Starts
// no case after `seconds`. `share` is the kernel's memory throughput as a fraction of the
// throughput of a copy within the device. The throughput is the bytes that must cross device memory
// over the time. `share` has the quartiles of interleaved repeats. Launches are replayed from a
// graph, so small sizes show what a training step sees; these sizes are fractions of `values`, down
// to 1/8,192. Inputs are random. Exits with 1 if any byte differs.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/codec.h"
#include "format/layout.h"
#include "format/quantize.h"

namespace {

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "kernel_bench: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#define CGX_REQUIRE(call) require((call), #call)

class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t bytes) : bytes_(bytes) {
    CGX_REQUIRE(cudaMalloc(&data_, bytes));
    CGX_REQUIRE(cudaMemset(data_, 0xFF, bytes));
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  int64_t bytes() const { return bytes_; }
  void set(const void* from, int64_t bytes) const {
    CGX_REQUIRE(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice));
  }
  std::vector<uint8_t> get() const {
    std::vector<uint8_t> bytes(bytes_);
    CGX_REQUIRE(cudaMemcpy(bytes.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return bytes;
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_;
};

enum class Kernel { kEncode, kDecode, kReduce, kAccumulate };
constexpr const char* kKernels[] = {"encode", "decode", "reduce", "accumulate"};
constexpr const char* kDTypes[] = {"f32", "bf16", "f16"};

struct Case {
  Kernel kernel;
  int bits;
  cgx::DType dtype = cgx::DType::kF32;
  int world = 1;  // ranks of a reduce, peers of an accumulate
  int64_t rounding = 0;
  bool rotated = false;
  bool residual = false;
  int64_t bucket = 512;
  int64_t leaves = 1;
  bool zeros = false;  // half of the segments are zero
  bool units = false;  // leaves are matrices with a factor per row and column

  std::string name() const {
    std::string text = kKernels[static_cast<int>(kernel)];
    text += " " + std::to_string(bits) + " " + kDTypes[static_cast<int>(dtype)];
    if (kernel == Kernel::kReduce) text += " w" + std::to_string(world);
    if (kernel == Kernel::kAccumulate) text += " p" + std::to_string(world);
    if (rounding) text += " stochastic";
    if (rotated) text += " rotated";
    if (zeros) text += " zeros";
    if (units) text += " units";
    if (residual) text += " residual";
    if (bucket != 512) text += " bucket " + std::to_string(bucket);
    if (leaves != 1) text += " leaves " + std::to_string(leaves);
    return text;
  }
};

std::vector<Case> cases() {
  using D = cgx::DType;
  std::vector<Case> all;
  // What most training steps run comes first.
  for (int bits : {4, 8}) {
    all.push_back({Kernel::kEncode, bits});
    all.push_back({Kernel::kDecode, bits});
    for (int world : {2, 3, 4, 8}) all.push_back({Kernel::kReduce, bits, D::kF32, world});
    all.push_back({Kernel::kAccumulate, bits, D::kF32, 8});
  }
  for (D dtype : {D::kBF16, D::kF16}) {
    for (int bits : {4, 8}) {
      all.push_back({Kernel::kEncode, bits, dtype});
      all.push_back({Kernel::kDecode, bits, dtype});
      all.push_back({Kernel::kReduce, bits, dtype, 8});
    }
  }
  for (D dtype : {D::kF32, D::kBF16}) {
    for (Kernel kernel : {Kernel::kEncode, Kernel::kDecode, Kernel::kReduce, Kernel::kAccumulate}) {
      all.push_back({kernel, 4, dtype, kernel >= Kernel::kReduce ? 8 : 1, 0, true});
    }
    all.push_back({Kernel::kEncode, 4, dtype, 1, 1});
    all.push_back({Kernel::kReduce, 4, dtype, 8, 1});
    all.push_back({Kernel::kEncode, 4, dtype, 1, 0, false, true});
    all.push_back({Kernel::kReduce, 4, dtype, 8, 0, false, true});
    all.push_back({Kernel::kEncode, 4, dtype, 1, 0, true, true});
    all.push_back({Kernel::kReduce, 4, dtype, 8, 0, true, true});
    all.push_back({Kernel::kEncode, 4, dtype, 1, 1, true});
    all.push_back({Kernel::kAccumulate, 4, dtype, 2});
  }
  // What is recommended under Adam.
  for (D dtype : {D::kF32, D::kBF16}) {
    for (int bits : {4, 3}) {
      for (Kernel kernel : {Kernel::kEncode, Kernel::kDecode, Kernel::kReduce}) {
        Case units = {kernel, bits, dtype, kernel == Kernel::kReduce ? 8 : 1, 0, true};
        units.units = true;
        all.push_back(units);
      }
    }
  }
  for (int bits : {1, 2, 3, 5, 6, 7}) {
    all.push_back({Kernel::kEncode, bits});
    all.push_back({Kernel::kDecode, bits});
    all.push_back({Kernel::kReduce, bits, D::kF32, 4});
  }
  for (int64_t bucket : {64, 128, 1024, 2048, 8192}) {
    all.push_back({Kernel::kEncode, 4, D::kF32, 1, 0, false, false, bucket});
    all.push_back({Kernel::kDecode, 4, D::kF32, 1, 0, false, false, bucket});
    all.push_back({Kernel::kReduce, 4, D::kF32, 8, 0, false, false, bucket});
  }
  // Half of the segments are zero, so that every record has a mask.
  for (const bool rotated : {false, true}) {
    for (Kernel kernel : {Kernel::kEncode, Kernel::kDecode, Kernel::kReduce, Kernel::kAccumulate}) {
      Case zeros = {kernel, 4, D::kF32, kernel >= Kernel::kReduce ? 8 : 1, 0, rotated};
      zeros.zeros = true;
      all.push_back(zeros);
    }
  }
  // The kernels for several tiles and for any number of tiles have their own variants.
  for (int64_t bucket : {2048, 8192}) {
    for (Kernel kernel : {Kernel::kEncode, Kernel::kReduce}) {
      const int world = kernel == Kernel::kReduce ? 8 : 1;
      all.push_back({kernel, 4, D::kF32, world, 0, false, true, bucket});
      all.push_back({kernel, 4, D::kF32, world, 1, false, false, bucket});
      all.push_back({kernel, 4, D::kF32, world, 1, false, true, bucket});
    }
  }
  return all;
}

// Random values, the same for host and device.
std::vector<uint8_t> random_values(int64_t count, cgx::DType dtype) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<uint8_t> bytes(count * cgx::item_size(dtype));
  for (int64_t i = 0; i < count; ++i) {
    const float x = normal(rng);
    if (dtype == cgx::DType::kF32) {
      std::memcpy(&bytes[4 * i], &x, 4);
    } else {
      const uint32_t half =
          dtype == cgx::DType::kBF16 ? cgx::narrow_bf16<float>(x) : cgx::narrow_f16<float>(x);
      std::memcpy(&bytes[2 * i], &half, 2);
    }
  }
  return bytes;
}

constexpr uint32_t kKey[2] = {7, 11};
constexpr int kRank = 0;

// The arrays of one case. `values` is the number of values of one chunk for a reduce, and of all
// leaves otherwise. Leaves of whole buckets lie next to each other.
class Bench {
 public:
  Bench(const Case& c, int64_t values, const DeviceMemory& noise)
      : case_(c),
        chunks_(c.kernel == Kernel::kReduce ? c.world : 1),
        leaf_(leaf_size(c, values * chunks_)),
        size_(leaf_ * c.leaves),
        item_(cgx::item_size(c.dtype)),
        dtypes_(c.leaves, c.dtype) {
    const std::vector<cgx::SlotSpec> slots(c.leaves,
                                           {leaf_, c.bits, c.bucket, c.rounding, 3, c.rotated});
    const std::string error = owned_.build(slots, chunks_);
    if (!error.empty()) {
      std::fprintf(stderr, "kernel_bench: %s\n", error.c_str());
      std::exit(2);
    }
    in_ = make(size_ * item_);
    fill(*in_, noise);
    if (c.zeros) clear_segments();
    if (c.units) make_units();
    payload_ = make(rows() * layout().chunk_bytes);
    key_ = make(sizeof(kKey));
    key_->set(kKey, sizeof(kKey));
    cudaStream_t stream = nullptr;
    if (c.kernel != Kernel::kEncode) prepare_payload(stream);
    switch (c.kernel) {
      case Kernel::kReduce:
        out_ = make(layout().chunk_bytes);
        break;
      case Kernel::kEncode:
        break;
      case Kernel::kDecode:
      case Kernel::kAccumulate:
        out_ = make(size_ * item_);
        break;
    }
    if (c.residual) residual_ = make(size_ * item_);
    CGX_REQUIRE(cudaDeviceSynchronize());
  }

  // The bytes that the kernel must read and write.
  int64_t bytes_to_move() const {
    const int64_t record = layout().chunk_bytes, chunk = size_ / chunks_ * item_;
    const int64_t residual = case_.residual ? chunk : 0;
    switch (case_.kernel) {
      case Kernel::kEncode:
      case Kernel::kDecode:
        return chunk + record + residual;
      case Kernel::kReduce:
        return chunk + case_.world * record + residual;  // the peers' and the sum's
      case Kernel::kAccumulate:
        return 2 * chunk + case_.world * record;
    }
    return 0;
  }

  void launch(cudaStream_t stream) const {
    const std::vector<cgx::Range> all = {{0, layout().total_bytes()}};
    const std::vector<void*> in = leaves_of(in_->data());
    const std::vector<void*> out = leaves_of(out_ ? out_->data() : nullptr);
    const std::vector<void*> lost = leaves_of(residual_ ? residual_->data() : nullptr);
    const cgx::LeavesIn leaves{in.data(), dtypes_.data()};
    const cgx::LeavesOut outs{out.data(), dtypes_.data()};
    const cgx::LeavesOut residuals =
        residual_ ? cgx::LeavesOut{lost.data(), dtypes_.data()} : cgx::LeavesOut{};
    const auto* const key = reinterpret_cast<const uint32_t*>(key_->data());
    auto* const payload = reinterpret_cast<uint8_t*>(payload_->data());
    const auto all_units = units_of(units_ ? units_->data() : nullptr);
    const cgx::LeafUnits* const units = units_ ? all_units.data() : nullptr;
    switch (case_.kernel) {
      case Kernel::kEncode:
        CGX_REQUIRE(cgx::encode({layout(), leaves, residuals, key, cgx::RankSource{nullptr, -1},
                                 payload, true, 0, units},
                                all, stream));
        return;
      case Kernel::kDecode:
        CGX_REQUIRE(cgx::decode({layout(), payload, outs, units}, all, stream));
        return;
      case Kernel::kReduce: {
        const std::vector<cgx::Range> own = {{layout().begin[kRank], layout().begin[kRank + 1]}};
        CGX_REQUIRE(
            cgx::reduce({layout(), leaves, key, cgx::RankSource{nullptr, kRank}, payload, divisor(),
                         reinterpret_cast<uint8_t*>(out_->data()), true, residuals, units},
                        own, stream));
        return;
      }
      case Kernel::kAccumulate:
        CGX_REQUIRE(cgx::accumulate(
            {layout(), leaves, payload, case_.world, cgx::RankSource{nullptr, -1}, divisor(), outs},
            all, stream));
        return;
    }
  }

  // Whether a launch writes the same bytes as the CPU kernel.
  bool equals_cpu() const {
    cudaStream_t stream;
    CGX_REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    launch(stream);
    CGX_REQUIRE(cudaStreamSynchronize(stream));
    CGX_REQUIRE(cudaStreamDestroy(stream));
    const cgx::KernelTable& cpu = cgx::current_kernels();
    std::vector<uint8_t> values = in_->get();
    std::vector<uint8_t> payload = payload_->get(), result(out_ ? out_->bytes() : 0, 0xFF);
    std::vector<uint8_t> lost(residual_ ? residual_->bytes() : 0, 0xFF);
    std::vector<float> scratch(owned_.scratch_values() + 64);
    const std::vector<void*> in = leaves_of(values.data()), out = leaves_of(result.data());
    const std::vector<void*> residual = leaves_of(lost.data());
    const cgx::LeavesIn leaves{in.data(), dtypes_.data()};
    const cgx::LeavesOut outs{out.data(), dtypes_.data()};
    const cgx::LeavesOut residuals =
        residual_ ? cgx::LeavesOut{residual.data(), dtypes_.data()} : cgx::LeavesOut{};
    const cgx::Layout l = layout();
    const auto all_units = units_of(factors_.data());
    const cgx::LeafUnits* const units = units_ ? all_units.data() : nullptr;
    switch (case_.kernel) {
      case Kernel::kEncode: {
        std::vector<uint8_t> expected(payload.size(), 0xFF);
        cpu.encode({l, leaves, residuals, kKey, -1, expected.data(), scratch.data(), units}, 0,
                   l.total_bytes());
        cgx::zero_tails(l, expected.data());
        if (expected != payload) return false;
        break;
      }
      case Kernel::kDecode:
        cpu.decode({l, payload.data(), outs, scratch.data(), units}, 0, l.total_bytes());
        break;
      case Kernel::kReduce:
        cpu.reduce({l, leaves, kKey, kRank, payload.data(), divisor(), result.data(),
                    scratch.data(), residuals, units},
                   l.begin[kRank], l.begin[kRank + 1]);
        break;
      case Kernel::kAccumulate:
        cpu.accumulate(
            {l, leaves, payload.data(), case_.world, -1, divisor(), outs, scratch.data()}, 0,
            l.total_bytes());
        break;
    }
    return (!out_ || result == out_->get()) && (!residual_ || lost == residual_->get());
  }

 private:
  int64_t segment() const { return case_.bucket / cgx::kMaskBits; }
  void clear_segments() const {
    const int64_t bytes = segment() * item_, pairs = in_->bytes() / (2 * bytes);
    CGX_REQUIRE(cudaMemset2D(in_->data(), 2 * bytes, 0, bytes, pairs));
  }
  // One set of units for all leaves: rows, then columns.
  void make_units() {
    columns_ = std::min<int64_t>(leaf_, 4096);
    while (leaf_ % columns_ != 0) --columns_;
    std::mt19937 rng(2);
    std::uniform_real_distribution<float> factor(0.5f, 2.0f);
    factors_.resize(2 * (leaf_ / columns_ + columns_));
    for (float& f : factors_) f = factor(rng);
    units_ = make(factors_.size() * sizeof(float));
    units_->set(factors_.data(), factors_.size() * sizeof(float));
  }
  std::vector<cgx::LeafUnits> units_of(const void* first) const {
    if (!units_) return {};
    const auto* const rows = static_cast<const float*>(first);
    const int64_t count = leaf_ / columns_;
    const cgx::LeafUnits one{rows, rows + count, columns_, count + columns_};
    return std::vector<cgx::LeafUnits>(case_.leaves, one);
  }
  static std::unique_ptr<DeviceMemory> make(int64_t bytes) {
    return std::make_unique<DeviceMemory>(std::max<int64_t>(bytes, 16));
  }
  static void fill(const DeviceMemory& to, const DeviceMemory& noise) {
    for (int64_t at = 0; at < to.bytes(); at += noise.bytes()) {
      CGX_REQUIRE(cudaMemcpy(to.data() + at, noise.data(), std::min(noise.bytes(), to.bytes() - at),
                             cudaMemcpyDeviceToDevice));
    }
  }
  static int64_t leaf_size(const Case& c, int64_t values) {
    const int64_t size = values / c.leaves;
    return c.leaves > 1 && size > c.bucket ? size / c.bucket * c.bucket
                                           : std::max<int64_t>(size, 1);
  }
  std::vector<void*> leaves_of(void* first) const {
    std::vector<void*> leaves(case_.leaves);
    for (int64_t k = 0; first && k < case_.leaves; ++k) {
      leaves[k] = static_cast<char*>(first) + k * leaf_ * item_;
    }
    return leaves;
  }
  cgx::Layout layout() const { return owned_.view(); }
  // The divisor of a mean. For a power of two, the kernels multiply instead.
  float divisor() const { return static_cast<float>(case_.world); }
  int64_t rows() const { return case_.kernel == Kernel::kAccumulate ? case_.world : chunks_; }
  // Writes records of random values to every row: the chunks of a leaf have the same structure.
  void prepare_payload(cudaStream_t stream) const {
    const std::vector<void*> in = leaves_of(in_->data());
    for (int64_t row = 0; row < rows(); row += chunks_) {
      CGX_REQUIRE(
          cgx::encode({layout(),
                       {in.data(), dtypes_.data()},
                       {},
                       reinterpret_cast<const uint32_t*>(key_->data()),
                       cgx::RankSource{nullptr, -1},
                       reinterpret_cast<uint8_t*>(payload_->data()) + row * layout().chunk_bytes,
                       true},
                      {{0, layout().total_bytes()}}, stream));
    }
  }

  const Case case_;
  const int64_t chunks_, leaf_, size_, item_;
  const std::vector<cgx::DType> dtypes_;
  cgx::OwnedLayout owned_;
  int64_t columns_ = 0;
  std::vector<float> factors_;
  std::unique_ptr<DeviceMemory> in_, out_, payload_, residual_, key_, units_;
};

// A graph of `count` launches.
class Replay {
 public:
  Replay(int count, const std::function<void(cudaStream_t)>& launch, cudaStream_t stream) {
    cudaGraph_t graph;
    CGX_REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; ++i) launch(stream);
    CGX_REQUIRE(cudaStreamEndCapture(stream, &graph));
    CGX_REQUIRE(cudaGraphInstantiate(&graph_, graph, 0));
    CGX_REQUIRE(cudaGraphDestroy(graph));
    CGX_REQUIRE(cudaEventCreate(&begin_));
    CGX_REQUIRE(cudaEventCreate(&end_));
  }
  ~Replay() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaGraphExecDestroy(graph_);
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  // The time of the second of two replays. During the first one, the cache still holds what earlier
  // work has written, and someone has to wait until that is in memory.
  double microseconds(cudaStream_t stream) const {
    CGX_REQUIRE(cudaGraphLaunch(graph_, stream));
    CGX_REQUIRE(cudaEventRecord(begin_, stream));
    CGX_REQUIRE(cudaGraphLaunch(graph_, stream));
    CGX_REQUIRE(cudaEventRecord(end_, stream));
    CGX_REQUIRE(cudaStreamSynchronize(stream));
    float milliseconds;
    CGX_REQUIRE(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return 1e3 * milliseconds;
  }

 private:
  cudaGraphExec_t graph_;
  cudaEvent_t begin_, end_;
};

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}

}  // namespace

int main(int argc, char** argv) {
  int64_t values = int64_t{1} << 27;
  int repeats = 15;
  double seconds = 200;
  std::string only;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--values") values = std::atoll(argv[i + 1]);
    if (option == "--repeats") repeats = std::atoi(argv[i + 1]);
    if (option == "--only") only = argv[i + 1];
    if (option == "--seconds") seconds = std::atof(argv[i + 1]);
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  cudaStream_t stream;
  CGX_REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  // One copy size for all large cases, because a copy's speed depends on its length and place. The
  // minimum is for few values in many leaves, which take more bytes than that.
  const int64_t large_copy = std::max<int64_t>(2 * values, 1 << 20);
  const DeviceMemory from(large_copy), to(large_copy);
  constexpr int64_t kNoise = int64_t{1} << 22;
  std::vector<std::unique_ptr<DeviceMemory>> noise;
  for (int d = 0; d < 3; ++d) {
    const std::vector<uint8_t> bytes = random_values(kNoise, static_cast<cgx::DType>(d));
    noise.push_back(std::make_unique<DeviceMemory>(static_cast<int64_t>(bytes.size())));
    noise.back()->set(bytes.data(), static_cast<int64_t>(bytes.size()));
  }
  int wrong = 0, left_out = 0;
  const auto run = [&](const Case& c, int64_t count, int launches, bool check) {
    if (!only.empty() && c.name().find(only) == std::string::npos) return;
    if (elapsed() > seconds) {
      ++left_out;
      return;
    }
    const DeviceMemory& random = *noise[static_cast<int>(c.dtype)];
    // An odd count gives a short last bucket and rows that are not aligned.
    const bool equal =
        !check || Bench(c, std::min<int64_t>(300007, values | 7), random).equals_cpu();
    wrong += !equal;
    const Bench bench(c, count, random);
    const int64_t bytes = bench.bytes_to_move();
    const int64_t copied = launches > 1 ? (bytes / 2 + 511) / 512 * 512 : large_copy;
    const Replay ours(launches, [&](cudaStream_t s) { bench.launch(s); }, stream);
    const Replay copy(
        launches,
        [&](cudaStream_t s) {
          CGX_REQUIRE(cudaMemcpyAsync(to.data(), from.data(), copied, cudaMemcpyDeviceToDevice, s));
        },
        stream);
    std::vector<double> times, copies, shares;
    for (int i = -std::min(3, repeats); i < repeats; ++i) {
      const double t = ours.microseconds(stream), u = copy.microseconds(stream);
      if (i < 0) continue;
      times.push_back(t / launches);
      copies.push_back(u / launches);
      shares.push_back(u / t * static_cast<double>(bytes) / static_cast<double>(2 * copied));
    }
    const double median = quantile(times, 0.5);
    std::printf(
        "{\"case\": \"%s\", \"values\": %lld, \"microseconds\": %.3f, \"copy\": %.3f, "
        "\"gigabytes_per_second\": %.1f, \"share\": [%.3f, %.3f, %.3f], \"equals_cpu\": %s}\n",
        c.name().c_str(), static_cast<long long>(count), median, quantile(copies, 0.5),
        static_cast<double>(bytes) / median / 1e3, quantile(shares, 0.25), quantile(shares, 0.5),
        quantile(shares, 0.75),
        !check  ? "null"
        : equal ? "true"
                : "false");
    std::fflush(stdout);
  };
  for (const Case& c : cases()) run(c, values, 1, true);
  for (const int halvings : {13, 9, 5}) {
    const int64_t small = std::max<int64_t>(1, values >> halvings);
    for (const Case& c : {Case{Kernel::kEncode, 4}, Case{Kernel::kDecode, 4},
                          Case{Kernel::kReduce, 4, cgx::DType::kF32, 2},
                          Case{Kernel::kReduce, 4, cgx::DType::kF32, 8}}) {
      run(c, small, 20, false);
    }
  }
  // The cost of many leaves, to compare with the last of the small sizes.
  for (Kernel kernel : {Kernel::kEncode, Kernel::kDecode, Kernel::kReduce}) {
    Case many = {kernel, 4};
    many.world = kernel == Kernel::kReduce ? 8 : 1;
    many.leaves = 300;
    run(many, std::max<int64_t>(1, values >> 5), 5, true);
  }
  std::printf("{\"cases_with_other_bytes\": %d, \"left_out\": %d, \"seconds\": %.1f}\n", wrong,
              left_out, elapsed());
  return wrong ? 1 : 0;
}
