// Cuts a fusion buffer into the launches of an all-reduce over peers' memory.
#include <algorithm>

#include "cuda/codec.h"
#include "cuda/peer.h"

namespace cgx {

std::string check_peers(int64_t world) {
  if (world <= kMaxPeers) return "";
  return "the number of ranks is " + std::to_string(world) + ", must be at most " +
         std::to_string(kMaxPeers);
}

std::string peer_tables(const Layout& layout, LeavesIn in, LeavesOut out, LeavesOut residuals,
                        const LeafUnits* units, std::vector<PeerTableInUnits>* tables) {
  if (std::string error = check_peers(layout.world); !error.empty()) return error;
  struct Part {
    Piece piece;
    char* result;
    LeafUnits units;
  };
  std::vector<std::vector<Part>> parts(layout.world);  // by chunk
  int64_t buckets = 0, longest = 0;
  for_each_run(layout, 0, layout.total_bytes(), [&](const Run& run) {
    void* const residual = residuals.data ? residuals.data[run.leaf] : nullptr;
    void* const result = out.data[run.leaf];
    const DType dtype = in.dtype[run.leaf];
    const int64_t item = item_size(dtype), number = run.last - run.first;
    Part part{piece_of(run, in.data[run.leaf], residual, dtype,
                       run.offset - run.chunk * layout.chunk_bytes),
              static_cast<char*>(result) + run.first_value() * item,
              units ? units[run.leaf] : LeafUnits{}};
    part.piece.aligned &= aligned(result, item);
    part.piece.last = static_cast<int32_t>(number - 1);
    part.piece.tail = static_cast<int32_t>(run.values() - (number - 1) * run.slot.bucket_size);
    buckets += number;
    longest = std::max(longest, std::min(run.slot.size, run.slot.bucket_size));
    parts[run.chunk].push_back(part);
  });
  if (constexpr int64_t kMost = 1 << 30; buckets > kMost) {
    return "the number of buckets is " + std::to_string(buckets) + ", must be at most " +
           std::to_string(kMost);
  }
  // As few launches as can hold the pieces. Each launch takes its share of every chunk.
  int64_t launches = 0, most;
  do {
    ++launches, most = 0;
    for (const auto& chunk : parts) most += (chunk.size() + launches - 1) / launches;
  } while (most > kPeerPieces);
  tables->assign(most == 0 ? 0 : launches, PeerTableInUnits{});
  for (int64_t l = 0; l < static_cast<int64_t>(tables->size()); ++l) {
    PeerTableInUnits& table = (*tables)[l];
    int64_t before = 0, longest_chunk = 0;
    for (int64_t c = 0; c < layout.world; ++c) {
      const int64_t size = parts[c].size(), share = (size + launches - 1) / launches;
      table.chunk[c] = static_cast<int32_t>(before);
      for (int64_t k = l * share; k < std::min(size, (l + 1) * share); ++k) {
        table.piece[table.count] = parts[c][k].piece;
        table.piece[table.count].before = static_cast<int32_t>(before);
        table.leaves[table.count] = parts[c][k].units;
        table.result[table.count++] = parts[c][k].result;
        before += parts[c][k].piece.last + 1;
      }
      longest_chunk = std::max(longest_chunk, before - table.chunk[c]);
    }
    table.chunk[layout.world] = static_cast<int32_t>(before);
    table.packet = static_cast<int32_t>(std::max(std::max<int64_t>(1, kPacketValues / longest),
                                                 (longest_chunk + kPackets - 1) / kPackets));
    table.tiles = static_cast<int32_t>((longest + kTileValues - 1) / kTileValues);
  }
  return "";
}

}  // namespace cgx
