// Checks the operands of each call, then hands it to the engine and returns a future.
#include "handlers/mpi.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "cpu/kernels.h"
#include "handlers/fresh_results.h"
#include "handlers/operands.h"
#include "messages/fused.h"
#include "messages/rows.h"

namespace cgx {
namespace {

std::mutex engine_mutex;
std::shared_ptr<Engine> engine;

std::shared_ptr<Engine> current_engine() {
  const std::lock_guard<std::mutex> lock(engine_mutex);
  return engine;
}

// Detects twins. A function that is compiled once and called twice yields two operations that
// cannot be told apart, and each rank may run them in a different order. They reveal themselves by
// using different memory within one execution of a program.
class Twins {
 public:
  bool seen(int64_t run, int64_t channel, const void* operand, const void* result) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [at, fresh] = memory_.try_emplace({run, channel}, operand, result);
    if (fresh) {
      order_.push_back(at->first);
      if (order_.size() > kRemembered) {
        memory_.erase(order_.front());
        order_.pop_front();
      }
    }
    return at->second != std::make_pair(operand, result);
  }

 private:
  static constexpr size_t kRemembered = 4096;
  std::mutex mutex_;
  std::map<std::pair<int64_t, int64_t>, std::pair<const void*, const void*>> memory_;
  std::deque<std::pair<int64_t, int64_t>> order_;
};

// What every call is told about its ranks.
struct Where {
  Ranks position;  // of this process in the mesh
  Ints groups;     // [groups, world]: positions in the mesh
  int64_t world;
  int64_t channel;
};

// The ranks that take part in a call, and the first tag of its messages.
struct Group {
  int64_t rank;                // of this process in the group
  std::vector<int32_t> peers;  // rank in the communicator of each rank of the group
  int tag;
};

ffi::Error find_group(const std::string& name, const Where& where, const EngineSettings& settings,
                      Group* group) {
  CGX_TRY(check_world(name, where.world));
  CGX_TRY(check_count(name, "position", where.position, 1));
  CGX_TRY(check_groups(name, where.groups, where.world));
  const int64_t channels = settings.largest_tag / kCallTags;
  if (where.channel < 0 || where.channel >= channels) {
    return invalid(name, "channel is " + std::to_string(where.channel) + ", must be in [0, " +
                             std::to_string(channels) + ")");
  }
  group->tag = static_cast<int>(where.channel * kCallTags);
  for (const int64_t position : where.groups) {
    if (position >= 0 && position < settings.ranks) continue;
    return invalid(name, "groups hold position " + std::to_string(position) + ", must be in [0, " +
                             std::to_string(settings.ranks) + ")");
  }
  const int64_t own = where.position.typed_data()[0];
  if (own != settings.rank) {
    return invalid(name, "position " + std::to_string(own) + " of the mesh is on MPI rank " +
                             std::to_string(settings.rank) +
                             "; build the mesh from jax.devices() in their order");
  }
  const int64_t* const found = std::find(where.groups.begin(), where.groups.end(), own);
  if (found == where.groups.end()) {
    return invalid(name, "position " + std::to_string(own) + " is in no group");
  }
  group->rank = (found - where.groups.begin()) % where.world;
  const int64_t* const first = found - group->rank;
  for (int64_t r = 0; r < where.world; ++r) {
    group->peers.push_back(static_cast<int32_t>(first[r]));
  }
  return ffi::Error::Success();
}

// A call whose operands are checked.
struct Prepared {
  Group group;
  Engine::Start start;
  const void *operand = nullptr, *result = nullptr;  // tell it from a twin; null: no memory
};

// Checks a call with `prepare(settings, &prepared)` and hands it to the engine.
template <typename Prepare>
ffi::Future submit(std::string_view name, ffi::RunId run, int64_t channel, Prepare prepare) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const std::string call(name);
  const auto engine = current_engine();
  if (!engine) {
    promise.SetError(ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                                call + ": the MPI exchange of this process has been stopped"));
    return future;
  }
  Prepared prepared;
  const ffi::Error error =
      no_throw(call.c_str(), [&] { return prepare(engine->settings(), &prepared); });
  if (error.failure()) {
    promise.SetError(error);
    return future;
  }
  static Twins twins;
  if (prepared.operand && twins.seen(run.run_id, channel, prepared.operand, prepared.result)) {
    promise.SetError(ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        call + ": one compiled function (an inner jax.jit, or a scan's body with unroll) holds "
               "this call and the program calls "
               "that function more than once, so ranks could mix up the two. Reduce outside of "
               "that function, or use exchange=\"xla\" there"));
    return future;
  }
  engine->submit(call, std::move(prepared.group.peers), std::move(prepared.start),
                 [promise](const std::string& error) mutable {
                   // XLA may continue the program on this thread, which must then do arithmetic as
                   // XLA's own threads do.
                   const ScopedXla arithmetic;
                   if (error.empty()) {
                     promise.SetAvailable();
                   } else {
                     promise.SetError(ffi::Error(ffi::ErrorCode::kUnavailable, error));
                   }
                 });
  return future;
}

// The sum of a gather-sum is fp32 for a leaf that has units, because it is still in these units.
template <Collective kCollective>
Leaves sums_of(Leaves leaves, const LayoutAttributes& attributes) {
  for (size_t k = 0; k < leaves.dtype.size() && kCollective == Collective::kGatherSum; ++k) {
    if (attributes.has_units(k)) leaves.dtype[k] = DType::kF32;
  }
  return leaves;
}

template <Collective kCollective>
ffi::Error check_fused(const std::string& name, const Keys& keys, const ffi::RemainingArgs& args,
                       const ffi::RemainingRets& rets, const LayoutAttributes& attributes,
                       float divisor, FusedSpec* spec) {
  constexpr int64_t kKeys = has(kCollective, Phase::kScatter) ? 4 : 2;
  Leaves leaves, results, residuals, unit_operands;
  Units units;
  CGX_TRY(leaves.add(name, args, 1));
  CGX_TRY(split_units(name, attributes, &leaves, &unit_operands));
  CGX_TRY(results.add(name, rets, 1));
  CGX_TRY(results.split(name, leaves.size.size(), &residuals));
  if (!residuals.data.empty()) CGX_TRY(same_leaves(name, leaves, residuals));
  CGX_TRY(build_layout(name, leaves.size, attributes, &spec->owned));
  CGX_TRY(same_leaves(name, sums_of<kCollective>(leaves, attributes), results));
  CGX_TRY(units.add(name, leaves, unit_operands, attributes));
  CGX_TRY(check_count(name, "keys", keys, kKeys));
  CGX_TRY(check_divisor(name, divisor));
  prefer_huge_pages(results);
  prefer_huge_pages(residuals);
  spec->in.assign(leaves.data.begin(), leaves.data.end());
  spec->out.assign(results.data.begin(), results.data.end());
  spec->residuals.assign(residuals.data.begin(), residuals.data.end());
  spec->dtypes = leaves.dtype;
  spec->out_dtypes = results.dtype;
  spec->units = units.first;
  std::copy_n(keys.typed_data(), kKeys, spec->keys);
  spec->divisor = divisor;
  return ffi::Error::Success();
}

template <Collective kCollective>
ffi::Future reduce(Keys keys, Ranks position, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::RunId run, Ints slots, int64_t world, float divisor, Ints groups,
                   int64_t channel, std::string_view name, std::string_view program) {
  return submit(
      name, run, channel, [&](const EngineSettings& settings, Prepared* prepared) -> ffi::Error {
        const std::string call(name);
        const auto spec = std::make_shared<FusedSpec>();
        const int64_t chunks = kCollective == Collective::kGatherSum ? 1 : world;
        const LayoutAttributes attributes{slots, chunks, 1, /*takes_units=*/true};
        CGX_TRY(check_fused<kCollective>(call, keys, args, rets, attributes, divisor, spec.get()));
        CGX_TRY(find_group(call, {position, groups, world, channel}, settings, &prepared->group));
        spec->collective = kCollective;
        spec->world = world;
        spec->rank = prepared->group.rank;
        spec->tag = prepared->group.tag;
        spec->program = Program(program);
        if (!spec->in.empty()) prepared->operand = spec->in[0], prepared->result = spec->out[0];
        prepared->start = [spec](Engine::Means means) {
          return std::make_unique<FusedCall>(std::move(*spec), means.settings,
                                             std::move(means.port), means.workers, means.buffers);
        };
        return ffi::Error::Success();
      });
}

template <bool kGathers>
ffi::Future move_rows(Ranks position, ffi::AnyBuffer rows, ffi::Result<ffi::AnyBuffer> out,
                      ffi::RunId run, int64_t world, Ints groups, int64_t channel,
                      std::string_view name, std::string_view program) {
  return submit(
      name, run, channel, [&](const EngineSettings& settings, Prepared* prepared) -> ffi::Error {
        const std::string call(name);
        Group& group = prepared->group;
        CGX_TRY(find_group(call, {position, groups, world, channel}, settings, &group));
        // Any dtype will do: only the bytes matter.
        const int64_t bytes = static_cast<int64_t>(rows.size_bytes());
        if (!kGathers && bytes % world != 0) {
          return invalid(call, "size of rows is " + std::to_string(bytes) +
                                   ", must be a multiple of world, " + std::to_string(world));
        }
        const int64_t row_bytes = kGathers ? bytes : bytes / world;
        const int64_t result_bytes = static_cast<int64_t>(out->size_bytes());
        if (result_bytes != world * row_bytes) {
          return invalid(call, expected("bytes of the result", result_bytes, world * row_bytes));
        }
        const RowsSpec spec{kGathers,
                            static_cast<const uint8_t*>(rows.untyped_data()),
                            static_cast<uint8_t*>(out->untyped_data()),
                            row_bytes,
                            world,
                            group.rank,
                            group.tag,
                            Program(program)};
        prepared->operand = spec.in, prepared->result = spec.out;
        prepared->start = [spec](Engine::Means means) {
          return std::make_unique<RowsCall>(spec, means.settings, std::move(means.port),
                                            means.buffers);
        };
        return ffi::Error::Success();
      });
}

template <typename Binding>
auto with_ranks(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<Ints>("groups")
      .template Attr<int64_t>("channel")
      .template Attr<std::string_view>("name")
      .template Attr<std::string_view>("program");
}

template <bool kGathers>
XLA_FFI_Error* call_rows(XLA_FFI_CallFrame* frame) {
  static const auto handler = with_ranks(ffi::Ffi::Bind()
                                             .Arg<Ranks>()
                                             .Arg<ffi::AnyBuffer>()
                                             .Ret<ffi::AnyBuffer>()
                                             .Ctx<ffi::RunId>()
                                             .Attr<int64_t>("world"))
                                  .To(move_rows<kGathers>);
  return handler->Call(frame);
}

template <Collective kCollective>
XLA_FFI_Error* call_reduce(XLA_FFI_CallFrame* frame) {
  static const auto handler = with_ranks(with_layout(ffi::Ffi::Bind()
                                                         .Arg<Keys>()
                                                         .Arg<Ranks>()
                                                         .RemainingArgs()
                                                         .RemainingRets()
                                                         .Ctx<ffi::RunId>())
                                             .Attr<float>("divisor"))
                                  .To(reduce<kCollective>);
  return handler->Call(frame);
}

}  // namespace

std::vector<Handler> mpi_handlers() {
  return {{"cgx_all_reduce_mpi", call_reduce<Collective::kAllReduce>},
          {"cgx_gather_sum_mpi", call_reduce<Collective::kGatherSum>},
          {"cgx_scatter_mpi", call_rows<false>},
          {"cgx_gather_mpi", call_rows<true>}};
}

void set_engine(std::unique_ptr<Engine> next) {
  const bool follows = next != nullptr;
  std::shared_ptr<Engine> old(std::move(next));
  {
    const std::lock_guard<std::mutex> lock(engine_mutex);
    engine.swap(old);
  }
  if (old && follows) old->is_followed();
}

std::string engine_failure() {
  const auto current = current_engine();
  return current ? current->failure() : "";
}

}  // namespace cgx
