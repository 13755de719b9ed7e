#include "messages/started.h"

#include <random>

namespace cgx {

StartedCall::StartedCall(BufferPool& pool, const std::vector<int64_t>& sizes) {
  constexpr int64_t kLine = 64;
  int64_t total = 0;
  for (const int64_t size : sizes) {
    starts_.push_back(total);
    total += (size + kLine - 1) / kLine * kLine;
  }
  memory = pool.take(total);
}

void StartedCall::when_over(Then then) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!over_) {
      then_.push_back(std::move(then));
      return;
    }
  }
  then(error_);
}

void StartedCall::is_over(const std::string& error) {
  std::vector<Then> all;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    over_ = true;
    error_ = error;
    all.swap(then_);
  }
  for (const Then& then : all) then(error);
}

uint64_t StartedCalls::new_ticket() {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (process_ == 0) process_ = std::random_device{}();
  return uint64_t{process_} << 32 | ++count_;
}

std::shared_ptr<StartedCall> StartedCalls::make(const std::vector<int64_t>& sizes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto call = std::make_unique<StartedCall>(pool_, sizes);
  return {call.release(), [this](StartedCall* over) {
            const std::unique_ptr<StartedCall> owned(over);
            const std::lock_guard<std::mutex> again(mutex_);
            pool_.give_back(std::move(owned->memory));
          }};
}

void StartedCalls::put(int64_t lane, Id id, std::shared_ptr<StartedCall> call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& own = last_[lane];
  own.first = id;
  own.second.swap(call);
}

std::shared_ptr<StartedCall> StartedCalls::find(Id id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [lane, own] : last_) {
    if (own.first == id) return own.second;
  }
  return nullptr;
}

}  // namespace cgx
