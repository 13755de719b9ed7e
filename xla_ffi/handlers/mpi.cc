// Checks the operands of each call, then hands it to the engine and returns a future.
#include "handlers/mpi.h"

#include <string.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "cpu/kernels.h"
#include "handlers/bind.h"
#include "handlers/operands.h"
#include "messages/fused.h"
#include "messages/rows.h"
#include "messages/started.h"

namespace cgx {
namespace {

std::shared_mutex engine_mutex;  // shared by calls while they use the engine
std::unique_ptr<Engine> engine;

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

StartedCalls& started_calls() {
  static auto* const calls = new StartedCalls;  // outlives static destructors
  return *calls;
}

// What every call is told about its ranks.
struct Where {
  Ranks position;  // of this process in the mesh
  Ints groups;     // [groups, world]: positions in the mesh
  int64_t world;
  int64_t channel;
};

// Message tags come in channels of kCallTags. Calls within a program have the lower half of the
// channels. Those that outlive it have the rest, as lanes: two of one lane run in turn.
int64_t num_channels(const EngineSettings& settings) { return settings.largest_tag / kCallTags; }
int64_t num_lanes(const EngineSettings& settings) { return num_channels(settings) / 2; }

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
  const int64_t channels = num_channels(settings) - num_lanes(settings);
  if (where.channel < 0 || where.channel >= channels) {
    return must_be(name, "channel", where.channel, "in [0, " + std::to_string(channels) + ")");
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

ffi::Error check_twins(const std::string& call, ffi::RunId run, int64_t channel,
                       const Prepared& prepared) {
  static Twins twins;
  if (!prepared.operand || !twins.seen(run.run_id, channel, prepared.operand, prepared.result)) {
    return ffi::Error::Success();
  }
  return ffi::Error(
      ffi::ErrorCode::kFailedPrecondition,
      call +
          ": one compiled function (an inner jax.jit, or a scan's body with unroll) holds "
          "this call and the program calls "
          "that function more than once, so ranks could mix up the two. Reduce outside of "
          "that function, or use exchange=\"xla\" there");
}

ffi::Error stopped(const std::string& call) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    call + ": the MPI exchange of this process has been stopped");
}

// Settles a promise. XLA may continue the program on this thread, which must then do arithmetic as
// XLA's own threads do.
void settle(ffi::Promise& promise, const std::string& error) {
  const ScopedArithmetic arithmetic(Subnormals::kZeros);
  if (error.empty()) {
    promise.SetAvailable();
  } else {
    promise.SetError(ffi::Error(ffi::ErrorCode::kUnavailable, error));
  }
}

// Checks a call with `prepare(settings, &prepared)` and hands it to the engine.
template <typename Prepare>
ffi::Future submit(std::string_view name, ffi::RunId run, int64_t channel, Prepare prepare) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const std::string call(name);
  Prepared prepared;
  const std::shared_lock<std::shared_mutex> lock(engine_mutex);
  const ffi::Error error = no_throw(call.c_str(), [&]() -> ffi::Error {
    if (!engine) return stopped(call);
    CGX_TRY(prepare(engine->settings(), &prepared));
    return check_twins(call, run, channel, prepared);
  });
  if (error.failure()) {
    promise.SetError(error);
  } else {
    engine->submit(call, std::move(prepared.group.peers), std::move(prepared.start),
                   [promise](const std::string& error) mutable { settle(promise, error); });
  }
  return future;
}

// A fused call. Its spec gets the operands once they are checked.
template <Collective kCollective>
struct Fused {
  std::string call;
  Where where;
  LayoutAttributes attributes;
  Leaves leaves = {};
  Units units = {};
  std::shared_ptr<FusedSpec> spec = std::make_shared<FusedSpec>();

  Fused(std::string_view name, const Where& where, Ints slots)
      : call(name),
        where(where),
        attributes{slots, kCollective == Collective::kGatherSum ? 1 : where.world, 1,
                   /*longest_in_units=*/int64_t{1} << 62} {}

  ffi::Error check(const Keys& keys, const ffi::RemainingArgs& args, float divisor,
                   std::string_view program, const EngineSettings& settings, Group* group) {
    constexpr int64_t kKeys = has(kCollective, Phase::kScatter) ? 4 : 2;
    Leaves unit_operand;
    CGX_TRY(leaves.add(call, args, 1));
    CGX_TRY(split_units(call, attributes, &leaves, &unit_operand));
    CGX_TRY(build_layout(call, leaves.size, attributes, &spec->owned));
    CGX_TRY(units.add(call, leaves, unit_operand, attributes));
    CGX_TRY(check_count(call, "keys", keys, kKeys));
    CGX_TRY(check_divisor(call, divisor));
    CGX_TRY(find_group(call, where, settings, group));
    spec->collective = kCollective;
    spec->world = where.world;
    spec->in.assign(leaves.data.begin(), leaves.data.end());
    spec->dtypes = leaves.dtype;
    spec->units = units.first;
    std::copy_n(keys.typed_data(), kKeys, spec->keys);
    spec->divisor = divisor;
    spec->rank = group->rank;
    spec->tag = group->tag;
    spec->program = Program(program);
    return ffi::Error::Success();
  }
  ffi::Error check_results(const ffi::RemainingRets& rets) {
    Leaves results, residuals;
    CGX_TRY(results.add(call, rets, 1));
    CGX_TRY(results.split(call, leaves.size.size(), &residuals));
    if (!residuals.data.empty()) CGX_TRY(same_leaves(call, leaves, residuals));
    CGX_TRY(same_leaves(call, sums_of<kCollective>(leaves, attributes), results));
    prefer_huge_pages(results);
    prefer_huge_pages(residuals);
    spec->out.assign(results.data.begin(), results.data.end());
    spec->residuals.assign(residuals.data.begin(), residuals.data.end());
    spec->out_dtypes = results.dtype;
    return ffi::Error::Success();
  }
  Engine::Start start() const {
    return [spec = spec](Engine::Means means) {
      return std::make_unique<FusedCall>(std::move(*spec), means.settings, std::move(means.port),
                                         means.workers, means.buffers);
    };
  }
};

template <Collective kCollective>
ffi::Future reduce(Keys keys, Ranks position, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::RunId run, Ints slots, int64_t world, float divisor, Ints groups,
                   int64_t channel, std::string_view name, std::string_view program) {
  return submit(name, run, channel,
                [&](const EngineSettings& settings, Prepared* prepared) -> ffi::Error {
                  Fused<kCollective> fused(name, {position, groups, world, channel}, slots);
                  CGX_TRY(fused.check(keys, args, divisor, program, settings, &prepared->group));
                  CGX_TRY(fused.check_results(rets));
                  const FusedSpec& spec = *fused.spec;
                  if (!spec.in.empty())
                    prepared->operand = spec.in[0], prepared->result = spec.out[0];
                  prepared->start = fused.start();
                  return ffi::Error::Success();
                });
}

// Lets a call use copies of its operands, and memory for its results, which outlive this program.
template <Collective kCollective>
std::shared_ptr<StartedCall> with_own_memory(const Fused<kCollective>& fused, bool residuals) {
  const Leaves& leaves = fused.leaves;
  const Units& units = fused.units;
  FusedSpec* const spec = fused.spec.get();
  // The sums of a gather-sum may be wider than its leaves; those of an all-reduce take their place.
  constexpr bool kInPlace = kCollective == Collective::kAllReduce;
  const Leaves sums = sums_of<kCollective>(leaves, fused.attributes);
  const size_t count = leaves.size.size();
  std::vector<int64_t> sizes;
  for (size_t k = 0; k < count; ++k) sizes.push_back(leaves.bytes(k));
  for (size_t k = 0; k < count && !kInPlace; ++k) sizes.push_back(sums.bytes(k));
  for (size_t k = 0; k < count && residuals; ++k) sizes.push_back(leaves.bytes(k));
  sizes.push_back(2 * units.count * sizeof(float));
  const auto call = started_calls().make(sizes);
  const auto filled = [&](size_t i, const void* from) {
    if (sizes[i] > 0) memcpy(call->array(i), from, sizes[i]);
    return call->array(i);
  };
  for (size_t k = 0; k < count; ++k) spec->in[k] = filled(k, leaves.data[k]);
  size_t next = kInPlace ? 0 : count;
  const auto result = [&](size_t i) {
    call->results.emplace_back(call->array(i), sizes[i]);
    return call->array(i);
  };
  for (size_t k = 0; k < count; ++k) spec->out.push_back(result(next++));
  for (size_t k = 0; k < count && residuals; ++k) spec->residuals.push_back(result(next++));
  spec->out_dtypes = sums.dtype;
  const float* const numbers = reinterpret_cast<const float*>(filled(next, units.numbers));
  for (LeafUnits& own : spec->units) {
    if (own.rows == nullptr) continue;  // a leaf without units
    own.rows = numbers + (own.rows - units.numbers);
    own.columns = numbers + (own.columns - units.numbers);
  }
  return call;
}

uint64_t number_of(const Keys& ticket) {
  return uint64_t{ticket.typed_data()[0]} << 32 | ticket.typed_data()[1];
}

template <Collective kCollective>
ffi::Error start(Keys keys, Ranks position, Keys ticket, ffi::RemainingArgs args,
                 ffi::Result<Keys> out, ffi::RunId run, Ints slots, int64_t world, float divisor,
                 Ints groups, int64_t channel, std::string_view name, std::string_view program,
                 int64_t number, int64_t residuals) {
  const std::string call(name);
  return no_throw(call.c_str(), [&]() -> ffi::Error {
    const std::shared_lock<std::shared_mutex> lock(engine_mutex);
    if (!engine) return stopped(call);
    CGX_TRY(check_count(call, "ticket", ticket, 2));
    CGX_TRY(check_count(call, "the result", *out, 2));
    Fused<kCollective> fused(name, {position, groups, world, channel}, slots);
    Prepared prepared;
    CGX_TRY(fused.check(keys, args, divisor, program, engine->settings(), &prepared.group));
    prepared.operand = ticket.typed_data(), prepared.result = out->typed_data();
    CGX_TRY(check_twins(call, run, channel, prepared));
    // The ranks agree on the lane, since they run the same programs.
    Fingerprint lane;
    lane.add(fused.spec->program.fingerprint);
    lane.add(channel);
    const int64_t lanes = num_lanes(engine->settings());
    const int64_t own = num_channels(engine->settings()) - lanes + lane.value() % lanes;
    fused.spec->tag = static_cast<int>(own * kCallTags);
    const auto started = with_own_memory(fused, residuals != 0);
    StartedCalls& calls = started_calls();
    const uint64_t known = number_of(ticket), id = known != 0 ? known : calls.new_ticket();
    calls.put(own, {id, number}, started);
    engine->submit(
        call, std::move(prepared.group.peers), fused.start(),
        [started](const std::string& error) { started->is_over(error); }, own);
    out->typed_data()[0] = static_cast<uint32_t>(id >> 32);
    out->typed_data()[1] = static_cast<uint32_t>(id);
    return ffi::Error::Success();
  });
}

template <Collective kCollective>
ffi::Future finish(Keys keys, Ranks position, Keys ticket, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::RunId run, Ints slots, int64_t world,
                   float divisor, Ints groups, int64_t channel, std::string_view name,
                   std::string_view program, int64_t number) {
  const std::string call(name);
  ffi::Promise promise;
  ffi::Future future(promise);
  std::shared_ptr<StartedCall> started;
  Leaves results;
  const ffi::Error error = no_throw(call.c_str(), [&]() -> ffi::Error {
    CGX_TRY(check_count(call, "ticket", ticket, 2));
    started = started_calls().find({number_of(ticket), number});
    if (!started) return ffi::Error::Success();
    CGX_TRY(results.add(call, rets, 1));
    CGX_TRY(check_number(call, "results", results.data.size(), started->results.size()));
    for (size_t k = 0; k < results.data.size(); ++k) {
      const int64_t wanted = started->results[k].second;
      if (results.bytes(k) == wanted) continue;
      return invalid(call,
                     expected("bytes of result " + std::to_string(k), results.bytes(k), wanted));
    }
    prefer_huge_pages(results);
    return ffi::Error::Success();
  });
  if (error.failure()) {
    promise.SetError(error);
    return future;
  }
  if (!started) {
    return reduce<kCollective>(keys, position, args, rets, run, slots, world, divisor, groups,
                               channel, name, program);
  }
  started->when_over([started, promise, data = results.data](const std::string& error) mutable {
    for (size_t k = 0; k < data.size() && error.empty(); ++k) {
      const auto& [from, bytes] = started->results[k];
      if (bytes > 0) memcpy(data[k], from, bytes);
    }
    settle(promise, error);
  });
  return future;
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
          return must_be(call, "size of rows", bytes,
                         "a multiple of world, " + std::to_string(world));
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

template <bool kGathers>
XLA_FFI_Error* call_rows(XLA_FFI_CallFrame* frame) {
  return call<move_rows<kGathers>>(frame, "world", "groups", "channel", "name", "program");
}

// Calls the handler of a fused call, or of a part of one, which has `more` attributes.
template <auto kFunction, typename... Names>
XLA_FFI_Error* call_fused(XLA_FFI_CallFrame* frame, Names... more) {
  return call<kFunction>(frame, "slots", "world", "divisor", "groups", "channel", "name", "program",
                         more...);
}
template <Collective kCollective>
XLA_FFI_Error* call_reduce(XLA_FFI_CallFrame* frame) {
  return call_fused<reduce<kCollective>>(frame);
}
template <Collective kCollective>
XLA_FFI_Error* call_start(XLA_FFI_CallFrame* frame) {
  return call_fused<start<kCollective>>(frame, "number", "residuals");
}
template <Collective kCollective>
XLA_FFI_Error* call_finish(XLA_FFI_CallFrame* frame) {
  return call_fused<finish<kCollective>>(frame, "number");
}

}  // namespace

std::vector<Handler> mpi_handlers() {
  return {{"cgx_all_reduce_mpi", call_reduce<Collective::kAllReduce>},
          {"cgx_gather_sum_mpi", call_reduce<Collective::kGatherSum>},
          {"cgx_scatter_mpi", call_rows<false>},
          {"cgx_gather_mpi", call_rows<true>},
          {"cgx_start_all_reduce_mpi", call_start<Collective::kAllReduce>},
          {"cgx_start_gather_sum_mpi", call_start<Collective::kGatherSum>},
          {"cgx_finish_all_reduce_mpi", call_finish<Collective::kAllReduce>},
          {"cgx_finish_gather_sum_mpi", call_finish<Collective::kGatherSum>}};
}

void set_engine(std::unique_ptr<Engine> next) {
  static std::mutex mutex;  // one after the other
  const std::lock_guard<std::mutex> turn(mutex);
  Engine* const current = next.get();
  {
    const std::unique_lock<std::shared_mutex> lock(engine_mutex);
    engine.swap(next);
  }
  if (next && current) next->is_followed();
  next.reset();  // the old engine, whose receives would take the notices for the current one
  if (current) current->listen();
}

std::string engine_failure() {
  const std::shared_lock<std::shared_mutex> lock(engine_mutex);
  return engine ? engine->failure() : "";
}

}  // namespace cgx
