#include "fuzz/communicators.h"

#include <deque>
#include <map>

#include "nccl.h"
#include "nccl/library.h"

namespace fuzz {
namespace {

uint64_t received = 0;

const emulator::Comm& comm_of(cgx::NcclComm comm) {
  return *reinterpret_cast<emulator::Comm*>(comm);
}

// The memory of a group's windows, by the group's size, the window's number and the rank. A rank
// may ask for another rank's window before that rank has registered it; NCCL would wait for that
// rank.
struct Windows {
  std::vector<std::vector<std::unique_ptr<uint64_t[]>>> memory;
  std::map<int, size_t> made;  // by rank
};
std::map<int, Windows> windows;
std::map<int, const emulator::Comm*> on_device;

// A window's handle is made up of its number and the size of its group.
constexpr size_t kMostWindows = 1 << 20;

int reserve(void** memory, size_t bytes) {
  const emulator::Comm& comm = *on_device[emulator::device()];
  Windows& own = windows[comm.world];
  const size_t made = own.made[comm.rank];
  if (own.memory.size() == made) {
    own.memory.emplace_back();
    for (int r = 0; r < comm.world; ++r) own.memory.back().emplace_back(new uint64_t[bytes / 8]());
  }
  *memory = own.memory[made][comm.rank].get();
  return cgx::NcclLibrary::kSuccess;
}

int enter(cgx::NcclComm comm, void*, size_t, cgx::NcclWindow* window, int) {
  const emulator::Comm& own = comm_of(comm);
  const size_t number = windows[own.world].made[own.rank]++;
  *window = reinterpret_cast<cgx::NcclWindow>(own.world * kMostWindows + number + 1);
  return cgx::NcclLibrary::kSuccess;
}

int find(cgx::NcclWindow window, size_t, int peer, void** pointer) {
  const size_t all = reinterpret_cast<size_t>(window) - 1;
  *pointer = windows[all / kMostWindows].memory[all % kMostWindows][peer].get();
  return cgx::NcclLibrary::kSuccess;
}

int split(cgx::NcclComm from, int, int, cgx::NcclComm* made, cgx::NcclConfig*) {
  static std::deque<emulator::Comm> all;
  all.push_back({comm_of(from).rank, comm_of(from).world});
  *made = emulator::handle(&all.back());
  return cgx::NcclLibrary::kSuccess;
}

int send(const void* data, size_t bytes, int, int, cgx::NcclComm, cudaStream_t stream) {
  emulator::submit(stream, [=] {
    volatile char last = 0;  // reads all: the memory must still exist
    for (size_t i = 0; i < bytes; ++i) last = static_cast<const char*>(data)[i];
    static_cast<void>(last);
    return true;
  });
  return cgx::NcclLibrary::kSuccess;
}

int receive(void* data, size_t bytes, int, int peer, cgx::NcclComm, cudaStream_t stream) {
  emulator::submit(stream, [=] {
    Random(received, peer).fill(data, static_cast<int64_t>(bytes));
    return true;
  });
  return cgx::NcclLibrary::kSuccess;
}

}  // namespace

Member::Member(int rank, int world) : comm{rank, world} {
  static int devices = 0;
  const int before = emulator::device();
  emulator::set_device(device = ++devices);
  on_device[device] = &comm;
  stream = emulator::create_stream();
  emulator::set_device(before);
  extension = collectives(&comm);
}

std::string Member::run(const Call& call, XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage) {
  Frame frame;
  call.fill(&frame);
  XLA_FFI_InvokeContext context;
  context.stream = stream;
  context.device = device;
  context.extension = &extension.extension_base;
  return frame.call(handler, stage, &context);
}

void set_received(uint64_t seed) { received = seed; }

std::vector<std::unique_ptr<Member>>& members(int world) {
  static std::map<int, std::vector<std::unique_ptr<Member>>> all;
  auto& group = all[world];
  while (static_cast<int>(group.size()) < world) {
    group.push_back(std::make_unique<Member>(static_cast<int>(group.size()), world));
  }
  return group;
}

}  // namespace fuzz

namespace cgx {

const NcclLibrary* nccl_library(std::string*) {
  static const NcclLibrary library = [] {
    NcclLibrary l = emulator::nccl();
    l.group_start = [] { return NcclLibrary::kSuccess; };
    l.group_end = [] { return NcclLibrary::kSuccess; };
    l.comm_split = fuzz::split;
    l.send = fuzz::send;
    l.recv = fuzz::receive;
    l.mem_alloc = fuzz::reserve;
    l.window_register = fuzz::enter;
    l.peer_pointer = fuzz::find;
    return l;
  }();
  return &library;
}

}  // namespace cgx
