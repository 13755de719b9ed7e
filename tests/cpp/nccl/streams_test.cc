// Fused calls whose messages travel on several communicators at once. The bytes stay the same in
// whatever order ranks and streams reach the messages, and nothing waits forever.
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "nccl/ranks.h"

namespace {

constexpr int64_t kSegment = 45;  // one record of records()

// Leaves that give every chunk at least four records, and every rank the same number.
std::vector<cgx::SlotSpec> records(cgx::Collective collective, int64_t world) {
  return {{collective == cgx::Collective::kAllReduce ? world * 320 : 320, 4, 64, 0, 0}};
}

std::string text(const std::string& name, int64_t world, int64_t streams) {
  return name + " of world " + std::to_string(world) + " on " + std::to_string(streams) +
         " streams";
}

// Each stream has its own communicator, and each communicator has its own connections.
void any_number_of_streams() {
  for (const auto& [collective, name, residual] : kCollectives) {
    for (const int64_t world : {2, 3, 4}) {
      if (kHalfOfTheCases && world != 3) continue;
      const Problem problem(collective, leaves(collective, 2), world, static_cast<float>(world),
                            residual);
      const int64_t count = cgx::CudaFused::segments(problem.owned.view(), 60);
      for (int64_t streams = 1; streams <= cgx::kMostStreams; ++streams) {
        Run run{60, static_cast<uint64_t>(streams + world), streams};
        run.calls = 2;
        check(bool(outcome(problem, run)), text(name, world, streams));
        const int64_t used = std::min(streams, count);
        check(emulator::used() == used && emulator::connections() == used,
              text(name, world, streams) + ": communicators side by side");
      }
    }
  }
}

// Where ranks of one process meet inside NCCL: no rank continues before all have come. NCCL does
// this at the first messages of a communicator and at a split.
class Meetings {
 public:
  bool come(int64_t comm, int64_t world) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t full = (come_[comm]++ / world + 1) * world;
    changed_.notify_all();
    return changed_.wait_for(lock, std::chrono::minutes(2), [&] { return come_[comm] >= full; });
  }
  void reset() { come_.clear(); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, int64_t> come_;
} meetings;

thread_local cgx::NcclComm sending;
thread_local std::mt19937 dice;

cgx::NcclLibrary meeting_nccl() {
  using cgx::NcclComm;
  cgx::NcclLibrary l = emulator::nccl();
  l.group_start = [] {
    // Streams and other ranks may be anywhere at this point.
    for (uint32_t k = dice() % 4; k > 0; --k) std::this_thread::yield();
    if (dice() % 4 == 0) emulator::run_streams(dice());
    return emulator::group_start();
  };
  l.send = [](const void* data, size_t count, int, int peer, NcclComm comm, cudaStream_t stream) {
    sending = comm;
    return emulator::send(data, count, peer, emulator::comm_of(comm), stream);
  };
  l.group_end = [] {
    const auto* const comm = emulator::comm_of(sending);
    const int result = emulator::group_end();
    return meetings.come(comm->number, comm->world) ? result : 1;
  };
  l.comm_split = [](NcclComm from, int color, int key, NcclComm* made, cgx::NcclConfig* config) {
    const auto* const comm = emulator::comm_of(from);
    if (!meetings.come(comm->number, comm->world)) return 1;
    return emulator::nccl().comm_split(from, color, key, made, config);
  };
  return l;
}

// Every rank has a thread, which runs the streams at random moments.
void ranks_that_issue_in_any_order() {
  const cgx::NcclLibrary alone = emulated_nccl();
  emulated_nccl() = meeting_nccl();
  for (const auto& [collective, name, residual] : kCollectives) {
    for (int64_t streams = 1; streams <= cgx::kMostStreams; ++streams) {
      if (kHalfOfTheCases && streams % 3 != 2) continue;
      const int64_t world = streams % 2 ? 3 : 4;
      const Problem problem(collective, records(collective, world), world, 1.0f, residual);
      Ranks ranks(problem, {kSegment});
      meetings.reset();
      std::vector<std::string> errors(world);
      const auto in_threads = [&](auto stage) {
        std::vector<std::thread> threads;
        for (int64_t r = 0; r < world; ++r) {
          threads.emplace_back([&, r] {
            dice.seed(static_cast<uint32_t>(8 * streams + r));
            if (errors[r].empty()) errors[r] = stage(r);
          });
        }
        for (auto& thread : threads) thread.join();
      };
      // The runtime waits for all ranks between the two stages.
      in_threads([&](int64_t r) { return ranks.initialize(r, streams); });
      const int64_t made = emulator::made();
      in_threads([&](int64_t r) { return ranks.execute(r, streams); });
      for (const auto& error : errors) check(error.empty(), text(name, world, streams) + error);
      check(emulator::made() == made, text(name, world, streams) + ": made between messages");
      check(emulator::run_streams(1) && ranks.right(), text(name, world, streams) + ", threads");
    }
  }
  emulated_nccl() = alone;
}

void every_wait_is_needed() {
  for (const auto collective : {cgx::Collective::kAllReduce, cgx::Collective::kGatherSum}) {
    if (kHalfOfTheCases) break;
    const Problem problem(collective, records(collective, 2), 2, 1.0f);
    every_wait_is_needed(problem, kSegment, 3, "three streams");
  }
}

// Ranks that do not agree wait for each other forever, which the emulator shows.
void ranks_have_to_agree() {
  const auto collective = cgx::Collective::kAllReduce;
  const Problem problem(collective, records(collective, 2), 2, 1.0f);
  Ranks ranks(problem, {kSegment});
  for (int64_t r = 0; r < 2; ++r) check(ranks.initialize(r, 3).empty(), "three streams");
  for (int64_t r = 0; r < 2; ++r) check(ranks.execute(r, 2 + r).empty(), "two and three streams");
  check(!emulator::run_streams(1), "ranks on two and on three streams wait for ever");
}

// Whatever fails and whichever wire is late, the caller's stream waits for that wire.
void failures_come_after_every_wire() {
  constexpr int64_t kStreams = 4;
  const auto collective = cgx::Collective::kAllReduce;
  const Problem problem(collective, records(collective, 1), 1, 1.0f);
  for (int64_t failing = -1; failing < 12; ++failing) {
    for (int64_t late = 0; late < kStreams; ++late) {
      Ranks ranks(problem, {kSegment});
      check(ranks.initialize(0, kStreams).empty(), "four streams");
      const auto wires = ranks.lane(0).wires(ranks.comm(0), kStreams);
      check(wires.size() == kStreams, "four wires");
      bool open = false, after = false;
      emulator::submit(wires[late].stream, [&] { return open; });
      emulator::fail_at(failing);
      const std::string error = ranks.execute(0, kStreams);
      check(error.empty() == (failing < 0), "a failing call: " + error);
      emulator::submit(ranks.stream(0), [&] { return after = true; });
      emulator::run_streams(1);
      check(!after, "failing call " + std::to_string(failing) + ": the caller's stream is ahead");
      open = true;
      check(emulator::run_streams(1) && after, "the caller's stream goes on");
    }
  }
}

// The same for failures of CUDA, also when the failed call cannot order the streams either: `count`
// calls fail, one after the other.
void cuda_failures_come_after_every_wire() {
  constexpr int64_t kStreams = 3;
  const auto collective = cgx::Collective::kAllReduce;
  const Problem problem(collective, records(collective, 1), 1, 1.0f);
  for (const int64_t count : {1, 2}) {
    bool fails = true;
    for (int64_t failing = 0; fails; ++failing) {
      Ranks ranks(problem, {kSegment});
      check(ranks.initialize(0, kStreams).empty(), "three streams");
      int64_t over = 0;
      for (const auto& wire : ranks.lane(0).wires(ranks.comm(0), kStreams)) {
        for (int rest = 50; rest >= 0; --rest) {
          emulator::submit(wire.stream, [&over, rest] {
            over += rest == 0;
            return true;
          });
        }
      }
      emulator::fail_cuda_at(failing, count);
      fails = !ranks.execute(0, kStreams).empty();
      emulator::fail_cuda_at(-1);
      int64_t before = -1;
      emulator::submit(ranks.stream(0), [&] {
        before = over;
        return true;
      });
      check(emulator::run_streams(2 * failing + 1) && before == kStreams,
            std::to_string(count) + " failing calls from " + std::to_string(failing) +
                ": the caller's stream is ahead");
    }
  }
}

// What a device creates for communicators, and what it says if that fails.
void communicators() {
  cgx::NcclLibrary& nccl = emulated_nccl();
  const cgx::NcclLibrary whole = nccl;
  const auto connect = [&](cgx::CudaLane& lane, emulator::Comm& comm, int64_t streams) {
    return lane.connect(streams, nccl, emulator::handle(&comm), 0, 1,
                        std::chrono::milliseconds(20));
  };
  const auto comms = [](cgx::CudaLane& lane, emulator::Comm& comm, int64_t streams) {
    std::vector<cgx::NcclComm> all;
    for (const auto& wire : lane.wires(emulator::handle(&comm), streams)) all.push_back(wire.comm);
    return all;
  };
  emulator::reset();
  emulator::Comm comm = {0, 1};
  cgx::CudaLane lane;
  check(lane.prepare(1).empty() && comms(lane, comm, 1).size() == 1, "one wire exists already");
  check(comms(lane, comm, 2).empty(), "two do");
  check(connect(lane, comm, 2).empty() && connect(lane, comm, 4).empty(), "two, then four");
  const auto four = comms(lane, comm, 4);
  check(four.size() == 4 && four[0] == emulator::handle(&comm), "XLA's communicator is the first");
  check(comm.splits == 1, "which is split once");
  check(connect(lane, comm, 3).empty() && comms(lane, comm, 4) == four, "fewer make nothing");
  comm = {0, 1};  // another communicator at the old one's address
  check(connect(lane, comm, 3).empty() && comm.splits == 1, "which is split too");
  check(comms(lane, comm, 4).empty() &&
            comms(lane, comm, 3) != std::vector(four.begin(), four.begin() + 3),
        "and has communicators of its own");

  for (const int failing : {0, 1}) {
    emulator::reset();
    cgx::CudaLane unlucky;
    emulator::Comm other = {0, 1};
    emulator::fail_at(failing);
    check(connect(unlucky, other, 3) == "ncclCommSplit: internal error", "a split that fails");
    check(connect(unlucky, other, 3) == "ncclCommSplit: internal error", "is not tried again");
    check(comms(unlucky, other, 2).empty(), "and has no wires");
  }
  emulator::reset();
  cgx::CudaLane waiting;
  emulator::Comm other = {0, 1};
  nccl.comm_split = [](cgx::NcclComm, int, int, cgx::NcclComm*, cgx::NcclConfig*) {
    return cgx::NcclLibrary::kInProgress;
  };
  nccl.comm_get_async_error = [](cgx::NcclComm, int* state) {
    *state = cgx::NcclLibrary::kInProgress;
    return cgx::NcclLibrary::kSuccess;
  };
  const std::string late = connect(waiting, other, 2);
  check(late.find("still in progress after 20 ms: a rank has not come") != late.npos,
        "a split that never ends: " + late);
  nccl = whole;
  nccl.op_create = [](int*, void*, int, int, cgx::NcclComm) { return 1; };
  check(connect(waiting, comm, 2) == "ncclRedOpCreatePreMulSum: internal error",
        "a communicator that takes no mark");
  nccl = whole;
}

// All who ask agree on which communicator lies at an address, although a new one gives its first
// operator the number that the old one gave.
void generations() {
  emulator::Comm comm = {0, 1}, other = {0, 1};
  const auto of = [](emulator::Comm& comm) {
    int64_t generation = 0;
    const std::string said =
        cgx::generation_of(emulated_nccl(), emulator::handle(&comm), &generation);
    check(said.empty(), "generations: " + said);
    return generation;
  };
  const int64_t first = of(comm), of_other = of(other);
  check(of(comm) == first && of(comm) == first, "generations: a communicator keeps its own");
  comm = {0, 1, /*number=*/1};
  const int64_t second = of(comm);
  check(second != first && of(comm) == second, "generations: the next one has another");
  check(of(other) == of_other, "generations: other addresses do not matter");
}

// The message kernels of all streams run at once on any device, or the number is refused.
void messages_fit_on_the_device() {
  for (const int processors : {28, 33, 38, 39, 46, 58, 60, 132}) {
    for (int64_t streams = 2; streams <= cgx::kMostStreams; ++streams) {
      emulator::reset();
      emulator::set_processors(processors);
      emulator::Comm comm = {0, 1};
      cgx::CudaLane lane;
      check(lane.prepare(1).empty(), "processors: prepare");
      const auto handle = emulator::handle(&comm);
      // Those of a device that has connected fewer before may not become too many.
      lane.connect(2, emulated_nccl(), handle, 0, 1);
      const std::string said = lane.connect(streams, emulated_nccl(), handle, 0, 1);
      int blocks = 0;
      for (const auto& wire : lane.wires(handle, streams)) {
        blocks += emulator::comm_of(wire.comm)->blocks;
      }
      const std::string text = std::to_string(streams) + " streams on " +
                               std::to_string(processors) + " multiprocessors: ";
      check(said.empty() == (31 + streams <= processors), text + said);
      check(blocks <= processors, text + std::to_string(blocks) + " blocks");
      check(processors < 60 || blocks == 32 + 4 * (streams - 1), text + "none is left out");
      check(processors > 28 || streams != 3 ||
                said ==
                    "streams=3 needs 34 multiprocessors, so that the messages of all streams "
                    "can run at once, but this GPU has 28: use streams=1",
            text + said);
    }
  }
}

// A communicator whose messages are still on a stream is split after them.
void a_split_waits_for_messages() {
  const auto collective = cgx::Collective::kAllReduce;
  const Problem problem(collective, records(collective, 2), 2, 1.0f);
  Ranks ranks(problem, {kSegment});
  for (const int64_t streams : {1, 3}) {
    for (int64_t r = 0; r < 2; ++r) {
      const std::string said = ranks.initialize(r, streams);
      check(said.empty(), "a split after messages: " + said);
    }
    for (int64_t r = 0; r < 2; ++r) check(ranks.execute(r, streams).empty(), "messages");
  }
  check(emulator::run_streams(1) && ranks.right(), "messages before and after a split");
}

}  // namespace

int main() {
  any_number_of_streams();
  ranks_that_issue_in_any_order();
  every_wait_is_needed();
  ranks_have_to_agree();
  failures_come_after_every_wire();
  cuda_failures_come_after_every_wire();
  communicators();
  generations();
  messages_fit_on_the_device();
  a_split_waits_for_messages();
  return report();
}
