// Notices between virtual ranks. Each reaches every other rank once and whole, whenever it is sent.
#include "messages/notices.h"

#include <memory>
#include <string>

#include "cases.h"
#include "messages/network.h"

namespace {

using cgx::Notices;

std::vector<std::unique_ptr<Notices>> everyone(Network& network, int64_t ranks) {
  std::vector<std::unique_ptr<Notices>> all;
  for (int64_t r = 0; r < ranks; ++r) {
    all.push_back(std::make_unique<Notices>(std::make_unique<FakePort>(network, r),
                                            std::make_unique<FakePort>(network, r), ranks, r, 9));
    all.back()->listen();
  }
  return all;
}

void reach_all_others() {
  constexpr int64_t kRanks = 5;
  Network network(1);
  auto all = everyone(network, kRanks);
  const std::string cause = "a cause";
  all[3]->send(Notices::kFailed, cause);
  all[3]->send(Notices::kLeft, "later");  // ignored: the first notice stands
  all[1]->send(Notices::kLeft, "");
  for (int i = 0; i < 1000; ++i) {
    network.deliver();
    for (auto& notices : all) notices->poll();
  }
  for (int64_t r = 0; r < kRanks; ++r) {
    const std::string name = "rank " + std::to_string(r) + ": ";
    check(all[r]->of(3) == (r == 3 ? Notices::kNone : Notices::kFailed), name + "3 has failed");
    check(r == 3 || all[r]->text(3) == cause, name + "its words");
    check(all[r]->of(1) == (r == 1 ? Notices::kNone : Notices::kLeft), name + "1 has left");
    check(all[r]->of(0) == Notices::kNone, name + "0 has said nothing");
    check(!all[r]->poll(), name + "no more news");
  }
  for (auto& notices : all) notices.reset();
  check(network.empty(), "nothing is in flight at the end");
}

void a_long_text_is_cut() {
  Network network(2);
  auto all = everyone(network, 2);
  all[0]->send(Notices::kFailed, std::string(5000, 'x'));
  for (int i = 0; i < 100; ++i) network.deliver(), all[1]->poll(), all[0]->poll();
  const std::string text = all[1]->text(0);
  check(text.size() > 1000 && text == std::string(text.size(), 'x'), "the beginning arrives");
}

}  // namespace

int main() {
  reach_all_others();
  a_long_text_is_cut();
  return report();
}
