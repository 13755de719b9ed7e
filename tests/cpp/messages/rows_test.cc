// Rows between virtual ranks, over messages that are delayed at random. Every rank gets what it is
// sent, whatever moves first.
#include "messages/rows.h"

#include <algorithm>
#include <memory>

#include "cases.h"
#include "counted_memory.h"
#include "messages/network.h"

namespace {

using Bytes = std::vector<uint8_t>;

struct Case {
  bool gathers = false;
  int64_t row_bytes = 0;
};

// One call on every rank. Every array is a heap block of exactly its size.
struct Job {
  Job(const Case& c, int64_t world, int tag, std::mt19937& rng) : test(c), world(world), tag(tag) {
    for (int64_t r = 0; r < world; ++r) {
      Bytes& in = inputs.emplace_back((c.gathers ? 1 : world) * c.row_bytes);
      for (uint8_t& byte : in) byte = static_cast<uint8_t>(rng());
      outputs.emplace_back(world * c.row_bytes, uint8_t{7});
    }
  }
  std::unique_ptr<cgx::Call> start(int64_t rank, Network& network,
                                   const cgx::CallSettings& settings, cgx::BufferPool& buffers) {
    const cgx::RowsSpec spec{
        test.gathers, inputs[rank].data(), outputs[rank].data(), test.row_bytes, world, rank, tag};
    return std::make_unique<cgx::RowsCall>(spec, settings,
                                           std::make_unique<FakePort>(network, rank), buffers);
  }
  Bytes expected(int64_t rank) const {
    Bytes all;
    for (const Bytes& in : inputs) {
      const auto row = in.begin() + (test.gathers ? 0 : rank * test.row_bytes);
      all.insert(all.end(), row, row + test.row_bytes);
    }
    return all;
  }

  const Case test;
  const int64_t world;
  const int tag;
  std::vector<Bytes> inputs, outputs;
};

void run(const std::vector<Case>& cases, int64_t world, const cgx::CallSettings& settings,
         const std::string& name, uint32_t seed) {
  std::mt19937 rng(seed);
  Network network(seed + 1);
  std::vector<std::unique_ptr<Job>> jobs;
  for (size_t j = 0; j < cases.size(); ++j) {
    jobs.push_back(
        std::make_unique<Job>(cases[j], world, static_cast<int>(j) * cgx::kCallTags, rng));
  }
  const std::string wrong = run_in_any_order(
      network, world, jobs.size(), rng,
      [&](int64_t rank, size_t job, cgx::BufferPool& buffers) {
        return jobs[job]->start(rank, network, settings, buffers);
      },
      [&](const cgx::Call& call) {
        check(call.awaited().empty(), name + "awaits nothing once it is done");
      });
  if (!wrong.empty()) return check(false, name + wrong);
  for (const auto& job : jobs) {
    bool same = true;
    for (int64_t r = 0; r < world; ++r) same &= job->outputs[r] == job->expected(r);
    check(same, name + "every rank has the rows that it is sent");
  }
}

// A call holds one window of segments per peer and direction, however long its rows are.
void memory() {
  std::mt19937 rng(1);
  Network network(2);
  const int64_t world = 4;
  const cgx::CallSettings settings{1 << 12, 4};
  Job job({false, 1 << 18}, world, 0, rng);
  std::vector<cgx::BufferPool> buffers(world);
  const int64_t before = live;
  peak = before;
  std::vector<std::unique_ptr<cgx::Call>> calls;
  for (int64_t r = 0; r < world; ++r) calls.push_back(job.start(r, network, settings, buffers[r]));
  check(finish(network, calls), "memory: finishes");
  const int64_t each = (peak - before) / world;
  const int64_t windows = 2 * world * settings.window * settings.segment_bytes;
  check(each >= windows && each <= windows + 4 * settings.segment_bytes,
        "memory: " + std::to_string(each) + " bytes for windows of " + std::to_string(windows));
}

// Ranks that disagree are told so, and no row moves. `others` is the second rank's case.
void disagreement(const Case& own, const Case& others, const std::string& name) {
  std::mt19937 rng(1);
  Network network(1);
  cgx::BufferPool buffers;
  const cgx::CallSettings settings{64, 2};
  Job a(own, 2, 0, rng), b(others, 2, 0, rng);
  const auto first = a.start(0, network, settings, buffers);
  const auto second = b.start(1, network, settings, buffers);
  check(first->awaited() == "rank 1 (not heard from)", name + ": awaits " + first->awaited());
  for (int i = 0; i < 100; ++i) {
    network.deliver();
    first->advance(), second->advance();
  }
  for (const auto* call : {first.get(), second.get()}) {
    check(has(call->error(), "is in another call"), name + " is refused");
    check(!call->done(), name + " is never done");
  }
  const auto untouched = [](const Bytes& out, int64_t from, int64_t bytes) {
    return std::all_of(out.begin() + from, out.begin() + from + bytes,
                       [](uint8_t byte) { return byte == 7; });
  };
  check(untouched(a.outputs[0], own.row_bytes, own.row_bytes) &&
            untouched(b.outputs[1], 0, others.row_bytes) && !network.mismatched,
        name + ": no row has moved");
}

// A peer that does not take part is named, with the number of segments received from it.
void awaited() {
  std::mt19937 rng(1);
  Network network(1);
  cgx::BufferPool buffers[2];
  Job job({true, 640}, 2, 0, rng);
  const auto first = job.start(0, network, {64, 2}, buffers[0]);
  const auto second = job.start(1, network, {64, 2}, buffers[1]);
  for (int i = 0; i < 20; ++i) network.deliver();
  for (int i = 0; i < 20; ++i) first->advance();
  for (int i = 0; i < 20; ++i) second->advance();
  for (int i = 0; i < 20; ++i) network.deliver();  // two of the second rank's segments are out
  for (int i = 0; i < 20; ++i) first->advance();
  check(first->awaited() == "rank 1 (2 of 10 segments received)", "awaits " + first->awaited());
  for (int i = 0; i < 1000 && !(first->done() && second->done()); ++i) {
    network.deliver();
    first->advance(), second->advance();
  }
  check(first->done() && second->done(), "goes on when the peer does");
}

}  // namespace

int main() {
  uint32_t seed = 1;
  for (const int64_t world : {1, 2, 3, 4, 7}) {
    for (const int64_t segment : {64, 100, 1 << 17}) {
      for (const int64_t window : {2, 4}) {
        for (const int64_t row : {0, 1, 13, 63, 64, 65, 128, 129, 1000, 5003}) {
          for (const bool gathers : {false, true}) {
            run({{gathers, row}}, world, {segment, window},
                std::string(gathers ? "gather" : "scatter") + " of " + std::to_string(row) +
                    " bytes, world " + std::to_string(world) + ", segments of " +
                    std::to_string(segment) + ", window " + std::to_string(window) + ": ",
                seed++);
          }
        }
      }
    }
  }
  std::vector<Case> many;
  for (int64_t j = 0; j < 50; ++j) many.push_back({j % 2 == 1, 37 * j % 700});
  for (int i = 0; i < 5; ++i) run(many, 4, {64, 3}, "50 calls at once in any order: ", seed++);
  memory();
  disagreement({false, 100}, {false, 101}, "a row of another size");
  disagreement({false, 100}, {true, 100}, "a gather beside a scatter");
  disagreement({false, 0}, {false, 4096}, "a row beside none");
  awaited();
  return report();
}
