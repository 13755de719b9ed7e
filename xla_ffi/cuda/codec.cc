// Turns a layout's runs into tables of pieces, one launch each.
#include "cuda/codec.h"

#include <algorithm>
#include <vector>

namespace cgx {
namespace {

// Fills tables and launches each when it is full. Slots that round to nearest and slots that round
// with noise go to different tables, because they need different kernels, and so do leaves with and
// without units. Pieces come chunk by chunk.
template <typename Launch>
class Tables {
 public:
  Tables(const LeafUnits* units, Launch launch) : launch_(launch), units_(units) {}

  // `record` is where the run's first record lies.
  void add(const Run& run, const void* in, void* out, DType dtype, int64_t record) {
    stochastic_ = run.slot.rounding != Rounding::kNearest;
    const Piece piece = piece_of(run, in, out, dtype, record);
    const LeafUnits own = units_ ? units_[run.leaf] : LeafUnits{};
    add(piece, own, run.values(), item_size(dtype), std::min(run.slot.size, run.slot.bucket_size));
  }
  void clear(uint8_t* bytes, int64_t count, int64_t chunk) {
    if (count == 0) return;
    Piece piece = {};
    piece.out = reinterpret_cast<char*>(bytes);
    piece.unit = kClearedUnit;
    piece.chunk = static_cast<int32_t>(chunk);
    add(piece, {}, count, /*item=*/1, /*longest=*/0);
  }
  // Launches what is left. Returns the first error of all launches.
  cudaError_t finish() {
    for (Filling& filling : tables_) flush(filling);
    return error_;
  }

 private:
  struct Filling {
    Table table;  // its pieces are not zeroed: that would take longer than filling most tables
    bool stochastic, in_units;
    std::vector<LeafUnits> leaves;  // the units of each piece's leaf
    int64_t chunk_units, most, longest;
    int32_t chunk;

    Filling(bool stochastic, bool in_units) : stochastic(stochastic), in_units(in_units) {
      clear();
    }
    void clear() {
      table.units = table.count = 0;
      leaves.clear();
      chunk_units = most = longest = 0;
      chunk = -1;
    }
  };

  // Adds `total` values (or bytes to clear), in units of the piece's size. The limit on a table's
  // units may split them into several pieces. `longest` is the longest bucket.
  void add(Piece piece, const LeafUnits& own, int64_t total, int64_t item, int64_t longest) {
    Filling& f = tables_[2 * (own.rows != nullptr) + stochastic_];
    while (total > 0) {
      if (f.table.count >= most_pieces(std::max(f.longest, longest), f.in_units) ||
          f.table.units == kTableUnits) {
        flush(f);
      }
      f.longest = std::max(f.longest, longest);
      const int64_t units =
          std::min((total + piece.unit - 1) / piece.unit, kTableUnits - int64_t{f.table.units});
      const int64_t values = std::min(total, units * piece.unit);
      piece.before = f.table.units;
      piece.last = static_cast<int32_t>(units - 1);
      piece.tail = static_cast<int32_t>(values - (units - 1) * piece.unit);
      f.table.units += static_cast<int32_t>(units);
      f.chunk_units = piece.chunk == f.chunk ? f.chunk_units + units : units;
      f.chunk = piece.chunk;
      f.most = std::max(f.most, f.chunk_units);
      f.table.piece[f.table.count++] = piece;
      if (f.in_units) f.leaves.push_back(own);
      total -= values;
      if (piece.in) piece.in += values * item;
      if (piece.out) piece.out += values * item;
      piece.record += units * piece.stride();
      piece.bucket += units;
    }
  }
  void flush(Filling& f) {
    if (f.table.count > 0 && error_ == cudaSuccess) {
      f.table.tiles = static_cast<int32_t>((f.longest + kTileValues - 1) / kTileValues);
      const TableOptions options{f.in_units ? f.leaves.data() : nullptr, f.stochastic};
      error_ = launch_(f.table, options, static_cast<int32_t>(f.most));
    }
    f.clear();
  }

  Launch launch_;
  const LeafUnits* const units_;  // one per leaf; null: no leaf has any
  Filling tables_[4] = {{false, false}, {true, false}, {false, true}, {true, true}};
  bool stochastic_ = false;  // the table of the last run
  cudaError_t error_ = cudaSuccess;
};

// The leaves of a call, and where the records of their buckets lie.
struct Leaves {
  const Layout& layout;
  const void* const* in;  // null: none
  void* const* out;       // null: none
  const DType* dtype;
  const LeafUnits* units;
  bool in_rows;  // records lie in rows of a payload, one per chunk, not all in one row
  uint8_t* cleared = nullptr;  // the rows whose ends are cleared; null: none
};

// Launches tables of the records in the ranges. With `cleared`, also clears the bytes past the end
// of each chunk that lies in one of the ranges.
template <typename Launch>
cudaError_t launch_tables(const Leaves& leaves, const std::vector<Range>& ranges, Launch launch) {
  const Layout& layout = leaves.layout;
  Tables tables(leaves.units, launch);
  for (const Range& range : ranges) {
    for (int64_t chunk = 0; chunk < layout.world; ++chunk) {
      const int64_t begin = layout.begin[chunk], end = layout.begin[chunk + 1];
      const int64_t first = std::max(range.from, begin), last = std::min(range.to, end);
      const int64_t row = leaves.in_rows ? chunk * layout.chunk_bytes : 0;
      if (first < last) {
        for_each_run(layout, first, last, [&](const Run& run) {
          tables.add(run, leaves.in ? leaves.in[run.leaf] : nullptr,
                     leaves.out ? leaves.out[run.leaf] : nullptr, leaves.dtype[run.leaf],
                     row + run.offset - chunk * layout.chunk_bytes + range.shift);
        });
      }
      if (leaves.cleared && range.from <= begin && end <= range.to) {
        const int64_t used = layout.chunk_size(chunk);
        tables.clear(leaves.cleared + row + used, layout.chunk_bytes - used, chunk);
      }
    }
  }
  return tables.finish();
}

}  // namespace

cudaError_t encode(const CudaEncode& call, const std::vector<Range>& ranges, cudaStream_t stream) {
  const EncodeArgs args{call.payload, call.key, call.key_step, call.rank,
                        static_cast<int32_t>(call.layout.world)};
  const Leaves leaves{call.layout,         call.leaves.data,
                      call.residuals.data, call.leaves.dtype,
                      call.units,
                      /*in_rows=*/true,    call.tails ? call.payload : nullptr};
  return launch_tables(leaves, ranges, [&](const Table& table, TableOptions options, int32_t) {
    options.residual = call.residuals.data != nullptr;
    return launch_encode(table, args, options, table.units, stream);
  });
}

cudaError_t reduce(const CudaReduce& call, const std::vector<Range>& ranges, cudaStream_t stream) {
  const Layout& layout = call.layout;
  const ReduceArgs args{
      call.payload, call.chunk, layout.chunk_bytes, static_cast<int32_t>(layout.world),
      call.key,     call.rank,  call.divisor};
  const Leaves leaves{layout,
                      call.leaves.data,
                      call.residuals.data,
                      call.leaves.dtype,
                      call.units,
                      /*in_rows=*/false,
                      call.tails ? call.chunk : nullptr};
  return launch_tables(leaves, ranges, [&](const Table& table, TableOptions options, int32_t most) {
    options.residual = call.residuals.data != nullptr;
    return launch_reduce(table, args, options, most, stream);
  });
}

cudaError_t decode(const CudaDecode& call, const std::vector<Range>& ranges, cudaStream_t stream) {
  const DecodeArgs args{call.payload};
  const Leaves leaves{call.layout,       nullptr,    call.leaves.data,
                      call.leaves.dtype, call.units, /*in_rows=*/true};
  return launch_tables(leaves, ranges, [&](const Table& table, TableOptions options, int32_t) {
    return launch_decode(table, args, options, table.units, stream);
  });
}

cudaError_t accumulate(const CudaAccumulate& call, const std::vector<Range>& ranges,
                       cudaStream_t stream) {
  const AccumulateArgs args{call.payload, call.layout.chunk_bytes, static_cast<int32_t>(call.peers),
                            call.rank, call.divisor};
  const Leaves leaves{call.layout,       call.leaves.data, call.sums.data,
                      call.leaves.dtype, nullptr,          /*in_rows=*/false};
  return launch_tables(leaves, ranges, [&](const Table& table, TableOptions, int32_t) {
    return launch_accumulate(table, args, call.leaves.data == nullptr, table.units, stream);
  });
}

}  // namespace cgx
