#include "streams.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "warp.h"

namespace emulator {
namespace {

struct Message {
  const void* from;
  void* to;
  size_t bytes;
  int peer;
  bool posted = false;
  std::shared_ptr<bool> over = std::make_shared<bool>(false);
};

struct World {
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Event>> events;
  std::vector<std::shared_ptr<Grid>> grids;  // until their streams have run: kernels read them
  std::map<std::tuple<int64_t, int, int>, std::deque<Message>>
      sent;  // by (comm, from, to), in order
  std::vector<std::unique_ptr<Comm>> comms;
  std::map<std::pair<int64_t, int64_t>, int64_t> numbers;  // of a communicator's splits
  std::set<int64_t> used, connections, aborted;
  std::set<std::tuple<int64_t, int, int>> connected;   // ranks, by (comm, from, to)
  std::map<std::pair<int64_t, int>, int64_t> waiting;  // groups on a stream, by comm and rank
  int processors = 60;
  int64_t waits = 0, left_out = -1;
  int64_t calls = 0, failing = -1, cuda_calls = 0, cuda_failing = -1, cuda_failures = 0;
  uint64_t progress = 0;
  std::set<std::pair<int, const void*>> loaded;  // by device
  int64_t made = 0, launches = 0, cooperative = 0;
  int most_blocks = 0;
};

// The messages of a thread that wait for the end of their group.
struct Group {
  int depth = 0;
  std::vector<Message> messages;
  const Comm* comm = nullptr;
  Stream* stream = nullptr;
};

World world;
thread_local Group own;
thread_local int current_device = 0;

// Recursive, because its holder may run everything on the streams, and an operation may put other
// operations there.
std::recursive_mutex& mutex() {
  static std::recursive_mutex m;
  return m;
}
using Lock = std::lock_guard<std::recursive_mutex>;

constexpr int kSuccess = 0, kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5;
constexpr uintptr_t kAlignment = 16;  // NCCL takes any pointer, but copies single bytes then

int called() { return world.calls++ == world.failing ? kInternalError : kSuccess; }

// A step of a group of messages on its stream: posts what it sends, and takes what has arrived.
bool exchange(const Comm& comm, std::vector<Message>* group) {
  if (world.aborted.count(comm.number)) return true;
  bool over = true;
  for (Message& m : *group) {
    if (m.from && !m.posted) {
      m.posted = true;
      ++world.progress;
      world.sent[{comm.number, comm.rank, m.peer}].push_back(m);
    }
    if (m.to && !*m.over) {
      std::deque<Message>& queue = world.sent[{comm.number, m.peer, comm.rank}];
      if (!queue.empty()) {
        const Message& other = queue.front();
        if (other.bytes != m.bytes) {
          fprintf(stderr, "emulator: %zu bytes sent, %zu expected\n", other.bytes, m.bytes);
          abort();
        }
        memcpy(m.to, other.from, m.bytes);
        *other.over = *m.over = true;
        queue.pop_front();
        ++world.progress;
      }
    }
    over = over && *m.over;
  }
  return over;
}

int add(Message message, const Comm* comm, Stream* stream) {
  const Lock lock(mutex());
  if (const int result = called(); result != kSuccess) return result;
  const void* const data = message.from ? message.from : message.to;
  if (reinterpret_cast<uintptr_t>(data) % kAlignment != 0) return kInvalidArgument;
  if (own.depth == 0) {
    fprintf(stderr, "emulator: a message outside of a group\n");
    abort();
  }
  own.comm = comm;
  own.stream = stream;
  own.messages.push_back(std::move(message));
  return kSuccess;
}

}  // namespace

void submit(Stream* stream, Operation operation) {
  const Lock lock(mutex());
  if (!stream) {
    operation();
    return;
  }
  if (stream->captured) {
    stream->captured->push_back(
        [operation = std::move(operation)](Stream* on) { submit(on, operation); });
    return;
  }
  stream->queue.push_back([stream, operation = std::move(operation)] {
    after_kernels_of(stream);
    const bool over = operation();
    before_kernels_of(stream);
    return over;
  });
}

void submit_kernel(Stream* stream, unsigned blocks, unsigned threads, std::function<void()> body) {
  const Lock lock(mutex());
  if (stream && stream->captured) {
    stream->captured->push_back([blocks, threads, body = std::move(body)](Stream* on) {
      submit_kernel(on, blocks, threads, body);
    });
    return;
  }
  const int device = stream ? stream->device : current_device;
  // A grid runs only once, so every replay of a graph needs its own grid.
  auto grid = std::make_shared<Grid>(blocks, threads, std::move(body), stream, device);
  if (stream) {
    world.grids.push_back(grid);
    stream->queue.push_back([grid = std::move(grid)] {
      ++world.progress;
      return grid->step();
    });
    return;
  }
  while (!grid->step()) {
  }
  after_kernels_of(nullptr);
}

Stream* create_stream() {
  const Lock lock(mutex());
  world.streams.push_back(std::make_unique<Stream>(Stream{current_device, {}}));
  return world.streams.back().get();
}

Stream* make_stream() {
  const Lock lock(mutex());
  ++world.made;
  return create_stream();
}

Event* make_event() {
  const Lock lock(mutex());
  ++world.made;
  world.events.push_back(std::make_unique<Event>());
  return world.events.back().get();
}

// Never forgotten, because what a device keeps for later calls has no end.
std::map<void*, std::unique_ptr<void, decltype(&free)>>& device_memory() {
  static auto* const all = new std::map<void*, std::unique_ptr<void, decltype(&free)>>;
  return *all;
}

void* make_memory(size_t bytes) {
  const Lock lock(mutex());
  constexpr size_t kLine = 256;
  ++world.made;
  void* const memory = aligned_alloc(kLine, (bytes + kLine - 1) / kLine * kLine);
  if (memory) device_memory().emplace(memory, std::unique_ptr<void, decltype(&free)>(memory, free));
  return memory;
}

void free_memory(void* memory) {
  const Lock lock(mutex());
  device_memory().erase(memory);
}

void load(const void* kernel) {
  const Lock lock(mutex());
  world.made += world.loaded.insert({current_device, kernel}).second;
}

int64_t made() { return world.made; }

void count_launch(const void* kernel, int blocks, bool cooperative) {
  const Lock lock(mutex());
  load(kernel);
  ++world.launches;
  world.cooperative += cooperative;
  world.most_blocks = std::max(world.most_blocks, blocks);
}

int64_t launches() { return world.launches; }

int64_t cooperative_launches() { return world.cooperative; }

int most_blocks() { return world.most_blocks; }

void record(Event* event, Stream* stream) {
  const Lock lock(mutex());
  const auto reached = event->reached = std::make_shared<bool>(false);
  submit(stream, [=] {
    *reached = true;
    event->when = std::chrono::steady_clock::now();
    return true;
  });
}

void wait(Stream* stream, Event* event) {
  const Lock lock(mutex());
  if (world.waits++ == world.left_out) return;
  submit(stream, [reached = event->reached] { return !reached || *reached; });
}

void begin_capture(Stream* stream) { stream->captured = new Graph; }

Graph* end_capture(Stream* stream) { return std::exchange(stream->captured, nullptr); }

void set_device(int device) { current_device = device; }

int device() { return current_device; }

void set_processors(int processors) { world.processors = processors; }

int processors() { return world.processors; }

void reset() {
  world = World();
  own = Group();
  forget_words();
}

int64_t waits() { return world.waits; }

void leave_out(int64_t wait) { world.left_out = wait; }

bool run_streams(uint64_t seed) {
  const Lock lock(mutex());
  std::mt19937_64 random(seed);
  std::map<Stream*, uint64_t> rank;
  for (const auto& stream : world.streams) rank[stream.get()] = random();
  while (true) {
    std::vector<Stream*> ready;
    for (const auto& stream : world.streams) {
      if (!stream->queue.empty()) ready.push_back(stream.get());
    }
    if (ready.empty()) break;
    std::shuffle(ready.begin(), ready.end(), random);
    if (seed % 2 == 1) {
      std::sort(ready.begin(), ready.end(),
                [&](Stream* a, Stream* b) { return rank[a] < rank[b]; });
    }
    const uint64_t before = world.progress;
    bool moved = false;
    for (Stream* stream : ready) {
      if (!stream->queue.front()()) continue;
      stream->queue.pop_front();
      moved = true;
      break;
    }
    if (!moved && world.progress == before) return false;
  }
  for (const auto& stream : world.streams) after_kernels_of(stream.get());
  world.grids.clear();
  return true;
}

bool synchronize() {
  const Lock lock(mutex());
  if (run_streams(0)) return true;
  for (const auto& stream : world.streams) {
    if (stream->device != current_device) continue;
    if (!stream->queue.empty()) return false;
    after_kernels_of(stream.get());
  }
  return true;
}

bool query(Stream* stream) {
  const Lock lock(mutex());
  run_streams(0);
  return stream->queue.empty();
}

int group_start() {
  const Lock lock(mutex());
  if (const int result = called(); result != kSuccess) return result;
  ++own.depth;
  return kSuccess;
}

int group_end() {
  const Lock lock(mutex());
  if (own.depth == 0 || --own.depth > 0) return kSuccess;
  auto group = std::make_shared<std::vector<Message>>(std::move(own.messages));
  own.messages.clear();
  if (const int result = called(); result != kSuccess) return result;
  if (group->empty()) return kSuccess;
  world.used.insert(own.comm->number);
  world.connections.insert(own.comm->resources);
  for (const Message& m : *group) {
    world.made += world.connected.insert({own.comm->number, own.comm->rank, m.peer}).second;
  }
  ++world.waiting[{own.comm->number, own.comm->rank}];
  // By then, another communicator may have this one's address.
  submit(own.stream, [comm = *own.comm, group] {
    const bool over = exchange(comm, group.get());
    world.waiting[{comm.number, comm.rank}] -= over;
    return over;
  });
  return kSuccess;
}

void drop_group() { own = Group(); }

bool in_group() { return own.depth > 0; }

int split(Comm* from, bool share, int blocks, Comm** made) {
  const Lock lock(mutex());
  if (const int result = called(); result != kSuccess) return result;
  if (world.waiting[{from->number, from->rank}] > 0) return kInvalidUsage;
  const int64_t next = static_cast<int64_t>(world.numbers.size()) + 1;
  const int64_t number = world.numbers.insert({{from->number, from->splits++}, next}).first->second;
  world.comms.push_back(std::make_unique<Comm>(Comm{
      from->rank, from->world, number, from->share ? from->resources : number, share, blocks}));
  *made = world.comms.back().get();
  return kSuccess;
}

void abort_messages(const Comm& comm) {
  const Lock lock(mutex());
  world.aborted.insert(comm.number);
}

void forget_used() {
  const Lock lock(mutex());
  world.used.clear();
  world.connections.clear();
}

int64_t used() { return static_cast<int64_t>(world.used.size()); }

int64_t connections() { return static_cast<int64_t>(world.connections.size()); }

int send(const void* data, size_t count, int peer, const Comm* comm, Stream* stream) {
  return add({data, nullptr, count, peer}, comm, stream);
}

int recv(void* data, size_t count, int peer, const Comm* comm, Stream* stream) {
  return add({nullptr, data, count, peer}, comm, stream);
}

void fail_at(int64_t call) {
  const Lock lock(mutex());
  world.calls = 0;
  world.failing = call;
}

void fail_cuda_at(int64_t call, int64_t count) {
  const Lock lock(mutex());
  world.cuda_calls = 0;
  world.cuda_failing = call;
  world.cuda_failures = count;
}

bool cuda_fails() {
  const Lock lock(mutex());
  const int64_t since = world.cuda_calls++ - world.cuda_failing;
  return world.cuda_failing >= 0 && since >= 0 && since < world.cuda_failures;
}

}  // namespace emulator
