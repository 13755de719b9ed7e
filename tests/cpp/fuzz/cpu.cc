// The handlers for the CPU: the codec's, and those of codes.
#include "cpu/kernels.h"
#include "cpu/worker_pool.h"
#include "fuzz/codec.h"
#include "fuzz/codes.h"
#include "handlers/handlers.h"

namespace fuzz {
namespace {

constexpr int64_t kMost = 150'000;  // values, enough for several pieces
constexpr Codes kCodes{kMost, 1, 0};

// Threads that run their tasks either at once or long after the handler has returned.
class Unpunctual : public Threads {
 public:
  explicit Unpunctual(bool late) : late_(late) {}
  ~Unpunctual() override {
    for (const auto& [task, data] : tasks_) task(data);
  }
  int64_t count() const override { return 4; }
  void schedule(XLA_FFI_Task* task, void* data) override {
    if (!late_) return task(data);
    tasks_.emplace_back(task, data);
  }

 private:
  const bool late_;
  std::vector<std::pair<XLA_FFI_Task*, void*>> tasks_;
};

class Real : public Threads {
 public:
  int64_t count() const override { return pool_.num_threads(); }
  void schedule(XLA_FFI_Task* task, void* data) override {
    pool_.Schedule([=] { task(data); });
  }

 private:
  cgx::WorkerPool pool_{3};
};

std::string run(XLA_FFI_Handler* handler, const Call& call, Threads* threads) {
  XLA_FFI_InvokeContext context;
  context.threads = threads;
  Frame frame;
  call.fill(&frame);
  return frame.call(handler, XLA_FFI_ExecutionStage_EXECUTE, &context);
}

std::vector<std::string> results(const Call& call) {
  std::vector<std::string> all;
  for (const Array& own : call.rets) all.emplace_back(own.data, own.bytes());
  return all;
}

void set_results(Call* call, char byte) {
  for (Array& own : call->rets) std::memset(own.data, byte, own.bytes());
}

}  // namespace

void cpu_case(Random& random) {
  int64_t isas = 0;
  while (cgx::available_kernels()[isas]) ++isas;
  cgx::select_kernels(cgx::available_kernels()[random.below(isas)]->isa);
  static const auto handlers = cgx::cpu_handlers();
  const auto& [target, handler] = handlers[random.below(static_cast<int64_t>(handlers.size()))];
  const MakeCodec make = codec_maker(target);
  std::unique_ptr<Threads> threads;  // outlives the call: late tasks find its memory gone
  Call call = make ? make(random, kMost, kLongestBucket) : code_maker(target)(random, kCodes);
  const bool damaged = random.chance(2);
  if (damaged) damage(random, &call);
  if (random.chance(4)) threads = std::make_unique<Unpunctual>(random.chance(2));
  if (random.chance(256)) threads = std::make_unique<Real>();
  set_results(&call, 0);
  const std::string said = run(handler, call, threads.get());
  count(target, !said.empty());
  if (damaged) return;
  if (!said.empty()) fail(std::string(target) + " refuses a right call: " + said);
  // Residuals that share memory with operands have overwritten these operands.
  if (!call.shared.empty() || !random.chance(8)) return;
  const auto once = results(call);
  set_results(&call, -1);
  run(handler, call, nullptr);
  count(target, false);
  if (results(call) != once) fail(std::string(target) + " leaves a byte of a result out");
}

}  // namespace fuzz
