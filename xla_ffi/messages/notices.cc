#include "messages/notices.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

#include "messages/hello.h"

namespace cgx {

Notices::Notices(std::unique_ptr<Port> incoming, std::unique_ptr<Port> outgoing, int64_t ranks,
                 int64_t rank, int tag)
    : incoming_(std::move(incoming)),
      outgoing_(std::move(outgoing)),
      rank_(rank),
      tag_(tag),
      heard_(ranks) {
  for (int64_t r = 0; r < ranks; ++r) received_.push_back(std::make_unique<Notice>());
}

Notices::~Notices() {
  using std::chrono::milliseconds;
  for (int i = 0; leaving_ > 0 && i < 500; ++i) {
    finished_.clear();
    if (!outgoing_->poll(&finished_).empty()) break;
    leaving_ -= static_cast<int64_t>(finished_.size());
    std::this_thread::sleep_for(milliseconds(1));
  }
  if (leaving_ > 0) sent_.release();  // a message may still read it
  incoming_->cancel();
}

void Notices::listen() {
  for (int64_t r = 0; r < static_cast<int64_t>(received_.size()); ++r) {
    // Errors are ignored: a rank that cannot be reached shows up in the calls.
    if (r != rank_) incoming_->receive(r, tag_, received_[r].get(), sizeof(Notice), r);
  }
}

void Notices::send(Kind kind, const std::string& text) {
  if (sent_) return;
  sent_ = std::make_unique<Notice>();
  sent_->kind = kind;
  std::copy_n(text.begin(), std::min(text.size(), sizeof(sent_->text)), sent_->text);
  for (int64_t r = 0; r < static_cast<int64_t>(received_.size()); ++r) {
    if (r == rank_) continue;
    leaving_ += outgoing_->send(r, tag_, sent_.get(), sizeof(Notice), r).empty();
  }
}

bool Notices::poll() {
  finished_.clear();
  incoming_->poll(&finished_);  // the error of a dead rank shows up in the calls
  for (const int64_t r : finished_) heard_[r] = true;
  return !finished_.empty();
}

std::string Notices::text(int64_t rank) const {
  const auto& text = received_[rank]->text;
  return shown(text, std::end(text));
}

}  // namespace cgx
