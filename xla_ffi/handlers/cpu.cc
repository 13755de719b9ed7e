// Runs the calls on the threads of XLA's pool.
#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/nonfinite.h"
#include "cpu/pages.h"
#include "cpu/parallel.h"
#include "cpu/select.h"
#include "handlers/code_calls.h"
#include "handlers/codec_calls.h"
#include "handlers/handlers.h"

namespace cgx {
namespace {

constexpr int64_t kValuesLookedAt = 8;  // in the time that encoding one value takes

ffi::Error check_ranks(const Operands& all, int64_t from, int64_t to) {
  for (int64_t b = 0; b < all.batch; ++b) {
    if (all.ranks[b] < from || all.ranks[b] >= to) {
      return must_be(all.call, "rank", all.ranks[b],
                     "in [" + std::to_string(from) + ", " + std::to_string(to) + ")");
    }
  }
  return ffi::Error::Success();
}

// Calls f(batch element, from, to, scratch) for pieces of all fusion buffers.
template <typename F>
void split_buffers(ffi::ThreadPool& pool, const Operands& all, F f) {
  const Layout layout = all.layout();
  const int64_t count = pieces(layout.values);
  Scratch scratch(workers(pool, all.batch * count), all.owned.scratch_values());
  split_range(pool, all.batch, 0, layout.total_bytes(), count,
              [&](int64_t b, int64_t from, int64_t to, int64_t worker) {
                f(b, from, to, scratch.of(worker));
              });
}

struct Cpu {
  using Given = ffi::ThreadPool;
  static constexpr auto kTraits = ffi::Traits{};
  static constexpr int64_t kLongestInUnits = int64_t{1} << 62;
  static constexpr int64_t kShortestBucket = 1, kLongestBucket = int64_t{1} << 31;

  static ffi::Error encode(Given pool, const Operands& all, uint8_t* payload) {
    const Layout layout = all.layout();
    const int64_t bytes = layout.world * layout.chunk_bytes;
    CGX_TRY(check_ranks(all, -1, layout.world));
    prefer_huge_pages(all.results, all.batch);
    prefer_huge_pages(payload, all.batch * bytes);
    for (int64_t b = 0; b < all.batch; ++b) zero_tails(layout, payload + b * bytes);
    const KernelTable& kernels = current_kernels();
    split_buffers(pool, all, [&](int64_t b, int64_t from, int64_t to, float* scratch) {
      kernels.encode({layout, all.in(b), all.out(b), all.keys + 2 * b, all.ranks[b],
                      payload + b * bytes, scratch, all.leaf_units(b)},
                     from, to);
    });
    return ffi::Error::Success();
  }

  static ffi::Error reduce(Given pool, const Operands& all, const uint8_t* payload,
                           uint8_t* chunks) {
    const Layout layout = all.layout();
    const int64_t world = layout.world;
    CGX_TRY(check_ranks(all, 0, world));
    const int64_t count = pieces(layout.values / world), tasks = all.batch * count;
    Scratch scratch(workers(pool, tasks), all.owned.scratch_values());
    const KernelTable& kernels = current_kernels();
    // Chunks differ in length, so each batch element cuts its own.
    parallel_for(pool, tasks, [&](int64_t task, int64_t worker) {
      const int64_t b = task / count, piece = task % count, own = all.ranks[b];
      uint8_t* const chunk = chunks + b * layout.chunk_bytes;
      const int64_t begin = layout.begin[own], used = layout.chunk_size(own);
      if (piece == 0) std::fill(chunk + used, chunk + layout.chunk_bytes, uint8_t{0});
      kernels.reduce(
          {layout, all.in(b), all.keys + 2 * b, own, payload + b * world * layout.chunk_bytes,
           all.divisor, chunk, scratch.of(worker), all.out(b), all.leaf_units(b)},
          begin + chunk_cut(piece, used, count), begin + chunk_cut(piece + 1, used, count));
    });
    return ffi::Error::Success();
  }

  static ffi::Error decode(Given pool, const Operands& all, const uint8_t* payload) {
    const Layout layout = all.layout();
    prefer_huge_pages(all.results, all.batch);
    const KernelTable& kernels = current_kernels();
    split_buffers(pool, all, [&](int64_t b, int64_t from, int64_t to, float* scratch) {
      kernels.decode({layout, payload + b * layout.world * layout.chunk_bytes, all.out(b), scratch,
                      all.leaf_units(b)},
                     from, to);
    });
    return ffi::Error::Success();
  }

  static ffi::Error accumulate(Given pool, const Operands& all, const uint8_t* payload,
                               int64_t peers) {
    const Layout layout = all.layout();
    CGX_TRY(check_ranks(all, -1, peers));
    prefer_huge_pages(all.results, all.batch);
    const KernelTable& kernels = current_kernels();
    split_buffers(pool, all, [&](int64_t b, int64_t from, int64_t to, float* scratch) {
      kernels.accumulate({layout, all.in(b), payload + b * peers * layout.chunk_bytes, peers,
                          all.ranks[b], all.divisor, all.out(b), scratch},
                         from, to);
    });
    return ffi::Error::Success();
  }

  static ffi::Error pack_signs(Given pool, int64_t batch, int64_t n, const float* x, uint8_t* out) {
    prefer_huge_pages(out, batch * ((n + 7) / 8));
    const CodeKernels& codes = current_kernels().codes;
    split_runs(pool, batch, n, 8, [&](int64_t b, int64_t from, int64_t to) {
      codes.pack_signs(x + b * n + from, to - from, out + b * ((n + 7) / 8) + from / 8);
    });
    return ffi::Error::Success();
  }

  static ffi::Error unpack_signs(Given pool, int64_t batch, int64_t n, const uint8_t* payload,
                                 float* out) {
    prefer_huge_pages(out, 4 * batch * n);
    const CodeKernels& codes = current_kernels().codes;
    split_runs(pool, batch, n, 8, [&](int64_t b, int64_t from, int64_t to) {
      codes.unpack_signs(payload + b * ((n + 7) / 8) + from / 8, to - from,
                         batch * n > kNontemporalValues, out + b * n + from);
    });
    return ffi::Error::Success();
  }

  static ffi::Error select(Given pool, const Selections& all, ffi::RemainingRets scratch) {
    CGX_TRY(check_number(all.name, "results", 2 + scratch.size(), 2));
    const auto [name, batch, n, count, x, turns, stride, rank, at, taken] = all;
    if (!turns) {
      for (int64_t b = 0; b < batch; ++b) {
        largest(pool, x + b * n, n, count, at + b * count, taken + b * count);
      }
      return ffi::Error::Success();
    }
    for (int64_t i = 0; i < 2 * batch; ++i) {
      if (turns[i] < 0 || turns[i] >= n) {
        return must_be(name, "turn", turns[i], "in [0, " + std::to_string(n) + ")");
      }
    }
    parallel_for(pool, batch, [&all](int64_t b, int64_t) {
      above_sampled(all.x + b * all.n, all.n, all.count, all.turns + 2 * b, all.stride, all.rank,
                    all.at + b * all.count, all.taken + b * all.count);
    });
    return ffi::Error::Success();
  }

  static ffi::Error largest_of_buckets(Given pool, int64_t batch, int64_t n, const float* x,
                                       int64_t bucket_size, int64_t keep, int32_t* at,
                                       float* taken) {
    const CodeKernels& codes = current_kernels().codes;
    const int64_t count = (n + bucket_size - 1) / bucket_size * keep;
    prefer_huge_pages(at, 4 * batch * count);
    prefer_huge_pages(taken, 4 * batch * count);
    split_runs(pool, batch, n, bucket_size, [&](int64_t b, int64_t from, int64_t to) {
      codes.largest_of_buckets(x + b * n, n, bucket_size, keep, from / bucket_size,
                               (to + bucket_size - 1) / bucket_size, at + b * count,
                               taken + b * count);
    });
    return ffi::Error::Success();
  }

  template <typename Call>
  static ffi::Error encode_buckets(Given pool, int64_t batch, int64_t bytes, Call call) {
    prefer_huge_pages(call(0).codes, batch * bytes);
    cgx::encode_buckets(pool, batch, call);
    return ffi::Error::Success();
  }
};

// (leaves) -> found
ffi::Error find(const char* name, ffi::ThreadPool pool, ffi::RemainingArgs args,
                ffi::Result<ffi::Buffer<ffi::S32, 3>> found) {
  const int64_t batch = found->dimensions()[0];
  CGX_TRY(check_batch(name, batch));
  Leaves leaves;
  CGX_TRY(leaves.add(name, args, batch));
  const size_t n = leaves.size.size();
  CGX_TRY(check_number(name, "leaves", n, found->dimensions()[1]));
  CGX_TRY(check_number(name, "numbers per leaf", found->dimensions()[2], 2));
  if (n == 0) return ffi::Error::Success();
  std::vector<SearchedLeaf> all;
  int64_t values = 0;
  for (void* const data : leaves.pointers(batch)) {
    const size_t k = all.size() % n;
    all.push_back({data, leaves.dtype[k], leaves.size[k]});
    values += leaves.size[k];
  }
  NonFiniteTable table(found->typed_data(), all.size());
  split_range(pool, 1, 0, values, pieces(values / kValuesLookedAt),
              [&](int64_t, int64_t first, int64_t last, int64_t) {
                find_nonfinite(all, first, last, table);
              });
  return ffi::Error::Success();
}

XLA_FFI_Error* call_find(XLA_FFI_CallFrame* frame) {
  return named_call<find>(frame, "cgx_find_nonfinite");
}

}  // namespace

std::vector<Handler> cpu_handlers() {
  using Codec = CodecCalls<Cpu>;
  using Codes = CodeCalls<Cpu>;
  return {{"cgx_encode", Codec::encode},
          {"cgx_reduce", Codec::reduce},
          {"cgx_decode", Codec::decode},
          {"cgx_accumulate", Codec::accumulate},
          {"cgx_find_nonfinite", call_find},
          {"cgx_pack_signs", Codes::pack_signs},
          {"cgx_unpack_signs", Codes::unpack_signs},
          {"cgx_largest", Codes::largest},
          {"cgx_above_sampled", Codes::above_sampled},
          {"cgx_largest_of_buckets", Codes::largest_of_buckets},
          {"cgx_natural", Codes::natural},
          {"cgx_ternary", Codes::ternary},
          {"cgx_qsgd", Codes::qsgd}};
}

}  // namespace cgx
