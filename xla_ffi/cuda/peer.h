// An all-reduce in one kernel. The devices of a node map each other's memory.
//
// Every rank has a window: memory that all ranks may write. Each rank
//
//   1. encodes every other rank's chunk into its owner's window,
//   2. adds up what has arrived for its own chunk, and writes the encoded mean into every window,
//   3. decodes what has arrived for all chunks.
//
// A packet is the unit of synchronization: consecutive buckets of a chunk that share one flag. Its
// writer raises the packet's flag in the reader's window, and nothing else orders two devices.
//
// A flag holds the number of the launch that raised it, and a wait ends when it holds that number
// or a larger one. The window counts the launches, so a CUDA graph may be replayed. Why no launch
// takes a record of another: let rank B be in launch e + 1 while A is still in e.
//
//   - Step 1 of B overwrites records that A reads in step 2 of e. But B has ended e, so it has
//     every mean that A owns, and A raised the flag of each mean after its last read of the
//     records.
//   - Step 2 of B overwrites means that A reads in step 3 of e. But it waits for a flag of A with
//     the number e + 1, which A has not raised.
//
// So records need no second buffer. But the records of the two legs never share memory, because
// rows of another launch may have another size, and every launch has packets, so it waits for every
// rank.
//
// Windows may lie in host memory, for devices that cannot map each other's. Every byte then crosses
// the device's link, so a rank writes its means only into its own window, and all ranks read them
// there. The second rule holds for them too.
#ifndef CGX_CUDA_PEER_H_
#define CGX_CUDA_PEER_H_

#include <string>
#include <vector>

#include "cuda/kernels.h"

namespace cgx {

constexpr int kMaxPeers = 32;  // ranks per window: one lane waits for each

// Returns what is wrong with that many ranks, or "".
std::string check_peers(int64_t world);

// The tests have small buffers and set their own limits.
#if !defined(CGX_PEER_PIECES)
#define CGX_PEER_PIECES 192
#define CGX_PEER_PACKETS 4096
#define CGX_PEER_THREADS 384
#define CGX_PEER_PACKET 4096
#endif
constexpr int kPeerPieces = CGX_PEER_PIECES;
constexpr int kPackets = CGX_PEER_PACKETS;  // per chunk and launch, at most
constexpr int kPeerThreads = CGX_PEER_THREADS;
constexpr int64_t kPacketValues = CGX_PEER_PACKET;  // approximate: packets are whole buckets

// What a device keeps for a window, in its own memory. No other device touches it.
struct WindowState {
  uint8_t* window[kMaxPeers];  // every rank's, as this device maps it
  uint64_t epoch;              // launches that have ended
  uint32_t ended;              // warps of this launch
  uint32_t failed;             // not 0: a launch gave up, so what peers hold is unknown
};

enum class Leg { kToOwner, kFromOwner };

// Where things lie in a window; the same on all ranks.
struct WindowShape {
  int64_t area_bytes;  // for the records of one leg; the two legs never share memory
  int32_t world;
  bool in_host;

  static constexpr int64_t kAlignment = 256;
  // Flags lie before the rows.
  CGX_HD int64_t rows() const {
    const int64_t bytes = int64_t{sizeof(uint64_t)} * world * 2 * kPackets;
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  // In host memory the second area has one row, that of the window's owner.
  CGX_HD int64_t bytes() const {
    const int64_t row = (area_bytes / world + kAlignment - 1) / kAlignment * kAlignment;
    return rows() + area_bytes + (in_host ? row : area_bytes);
  }

  // The flag that `rank` raises when it has written that packet.
  CGX_HD uint64_t* arrived(uint8_t* window, Leg leg, int packet, int rank) const {
    const int64_t before = leg == Leg::kFromOwner ? kPackets : 0;
    return reinterpret_cast<uint64_t*>(window) + world * (before + packet) + rank;
  }
  // u8[rows, row_bytes]. kToOwner has one row from each rank; kFromOwner has one row per chunk, or
  // in host memory one row.
  CGX_HD uint8_t* payload(uint8_t* window, Leg leg) const {
    return window + rows() + (leg == Leg::kFromOwner ? area_bytes : 0);
  }
};

// Pieces of every chunk, chunk by chunk: `in` values, `out` residuals or null.
struct PeerTable {
  static constexpr bool kInUnits = false;
  Piece piece[kPeerPieces];
  char* result[kPeerPieces];     // where a piece's values go
  int32_t chunk[kMaxPeers + 1];  // units before each chunk
  int32_t count;                 // of pieces
  int32_t packet;                // units per packet
  int32_t tiles;                 // of the longest bucket

  CGX_HD const LeafUnits* leaf_units(int) const { return nullptr; }
};
// The same if some leaf has units.
struct PeerTableInUnits : PeerTable {
  static constexpr bool kInUnits = true;
  LeafUnits leaves[kPeerPieces];  // the units of each piece's leaf

  CGX_HD const LeafUnits* leaf_units(int p) const { return &leaves[p]; }
};

struct PeerArgs {
  WindowState* state;  // device
  WindowShape shape;
  uint32_t* told;        // host memory: becomes 1 if the launch gives up
  const uint32_t* keys;  // device: two words for encode and two for reduce
  int64_t row_bytes;
  int64_t patience;  // nanoseconds that a warp waits for a flag
  float divisor;
  int32_t own;
};
static_assert(sizeof(PeerTableInUnits) + sizeof(PeerArgs) <= 32764,
              "CUDA 13 takes so many parameters");

struct PeerOptions {
  bool residual = false, in_units = false;
  int sharers = 1;  // ranks on one device, as in the test on a machine with one GPU
};

// Launches one table. All ranks must launch the same tables in the same order, and a device's
// launches on a window must run one after the other.
cudaError_t launch_peer(const PeerTableInUnits& table, const PeerArgs& args, PeerOptions options,
                        cudaStream_t stream);

// Loads the kernels on the current device.
cudaError_t load_peer_kernels();

// Makes the tables of an all-reduce. Chunks and packets are the same on all ranks; pointers are
// not. `units` has one entry per leaf, or is null. Returns what is wrong with the layout, or "".
std::string peer_tables(const Layout& layout, LeavesIn in, LeavesOut out, LeavesOut residuals,
                        const LeafUnits* units, std::vector<PeerTableInUnits>* tables);

}  // namespace cgx

#endif  // CGX_CUDA_PEER_H_
