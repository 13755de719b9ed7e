// Checks the operands of a fused all-reduce, then hands it to the engine and returns a future.
#include "handlers/mpi.h"

#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "handlers/operands.h"

namespace cgx {
namespace {

std::mutex engine_mutex;
std::shared_ptr<Engine> engine;

std::shared_ptr<Engine> current_engine() {
  const std::lock_guard<std::mutex> lock(engine_mutex);
  return engine;
}

// A function that is compiled once and called twice makes two operations that nothing tells apart,
// and each rank may run them in another order. They show by running on different memory within
// one execution of a program.
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

struct Attributes {
  LayoutAttributes layout;
  float divisor;
  Ints groups;  // [groups, world]: positions in the mesh
  int64_t channel;
  std::string_view name;
};

ffi::Error prepare(const Keys& keys, const Ranks& position, const ffi::RemainingArgs& args,
                   const ffi::RemainingRets& rets, const Attributes& attributes,
                   const std::string& name, const EngineSettings& settings, FusedSpec* spec,
                   std::vector<int32_t>* peers) {
  Leaves leaves, results, residuals, unit_operands;
  Units units;
  CGX_TRY(leaves.add(name, args, 1));
  CGX_TRY(split_units(name, attributes.layout, &leaves, &unit_operands));
  CGX_TRY(results.add(name, rets, 1));
  CGX_TRY(results.split(name, leaves.size.size(), &residuals));
  CGX_TRY(same_leaves(name, leaves, results));
  if (!residuals.data.empty()) CGX_TRY(same_leaves(name, leaves, residuals));
  CGX_TRY(build_layout(name, leaves.size, attributes.layout, &spec->owned));
  CGX_TRY(units.add(name, leaves, unit_operands, attributes.layout));
  CGX_TRY(check_count(name, "keys", keys, 4));
  CGX_TRY(check_count(name, "position", position, 1));
  CGX_TRY(check_divisor(name, attributes.divisor));
  CGX_TRY(check_groups(name, attributes.groups, attributes.layout.world));
  const int64_t tag = attributes.channel * Transport::kTags;
  if (attributes.channel < 0 || tag + Transport::kTags > settings.largest_tag) {
    return invalid(name, "channel is " + std::to_string(attributes.channel) + ", must be in [0, " +
                             std::to_string(settings.largest_tag / Transport::kTags) + ")");
  }
  const int64_t own = position.typed_data()[0];
  if (own != settings.rank) {
    return invalid(name, "position " + std::to_string(own) + " of the mesh is on MPI rank " +
                             std::to_string(settings.rank) +
                             "; build the mesh from jax.devices() in their order");
  }
  for (size_t i = 0; i < attributes.groups.size(); ++i) {
    if (attributes.groups[i] != own) continue;
    const size_t first = i / attributes.layout.world * attributes.layout.world;
    spec->rank = static_cast<int64_t>(i - first);
    for (int64_t r = 0; r < attributes.layout.world; ++r) {
      peers->push_back(static_cast<int32_t>(attributes.groups[first + r]));
    }
    break;
  }
  if (static_cast<int64_t>(peers->size()) != attributes.layout.world) {
    return invalid(name, "position " + std::to_string(own) + " is in no group");
  }
  spec->in.assign(leaves.data.begin(), leaves.data.end());
  spec->out.assign(results.data.begin(), results.data.end());
  spec->residuals.assign(residuals.data.begin(), residuals.data.end());
  spec->dtypes = leaves.dtype;
  spec->units = units.first;
  std::copy_n(keys.typed_data(), 4, spec->keys);
  spec->divisor = attributes.divisor;
  spec->tag = static_cast<int>(tag);
  return ffi::Error::Success();
}

// (keys of both phases, position in the mesh, leaves, units) -> leaves [, residuals]
ffi::Future all_reduce(Keys keys, Ranks position, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::RunId run, Ints slots, int64_t world, float divisor, Ints groups,
                       int64_t channel, std::string_view name) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const std::string call(name);
  const auto engine = current_engine();
  if (!engine) {
    promise.SetError(ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                                call + ": the MPI exchange of this process has been stopped"));
    return future;
  }
  FusedSpec spec;
  std::vector<int32_t> peers;
  const ffi::Error error = no_throw(call.c_str(), [&] {
    return prepare(keys, position, args, rets,
                   {{slots, world, 1, /*takes_units=*/true}, divisor, groups, channel, name}, call,
                   engine->settings(), &spec, &peers);
  });
  if (error.failure()) {
    promise.SetError(error);
    return future;
  }
  static Twins twins;
  if (!spec.in.empty() && twins.seen(run.run_id, channel, spec.in[0], spec.out[0])) {
    promise.SetError(ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        call + ": one compiled function (an inner jax.jit, or a scan's body with unroll) holds "
               "this call and the program calls "
               "that function more than once, so ranks could mix up the two. Reduce outside of "
               "that function, or use exchange=\"xla\" there"));
    return future;
  }
  engine->submit(call, std::move(spec), std::move(peers),
                 [promise](const std::string& error) mutable {
                   if (error.empty()) {
                     promise.SetAvailable();
                   } else {
                     promise.SetError(ffi::Error(ffi::ErrorCode::kUnavailable, error));
                   }
                 });
  return future;
}

}  // namespace

XLA_FFI_Error* all_reduce_mpi_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = with_layout(ffi::Ffi::Bind()
                                              .Arg<Keys>()
                                              .Arg<Ranks>()
                                              .RemainingArgs()
                                              .RemainingRets()
                                              .Ctx<ffi::RunId>())
                                  .Attr<float>("divisor")
                                  .Attr<Ints>("groups")
                                  .Attr<int64_t>("channel")
                                  .Attr<std::string_view>("name")
                                  .To(all_reduce);
  return handler->Call(frame);
}

void set_engine(std::unique_ptr<Engine> next) {
  std::shared_ptr<Engine> old(std::move(next));
  {
    const std::lock_guard<std::mutex> lock(engine_mutex);
    engine.swap(old);
  }
}

std::string engine_failure() {
  const auto current = current_engine();
  return current ? current->failure() : "";
}

}  // namespace cgx
