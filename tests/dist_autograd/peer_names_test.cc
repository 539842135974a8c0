// What a worker remembers of the names of others.
#include "weft/dist_autograd/internal/peer_names.h"

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace weft::internal {
namespace {

WorkerInfo worker(uint32_t id) {
  return WorkerInfo{absl::StrCat("w", id), id, /*incarnation=*/1000 + id};
}

TEST(PeerNames, OfWorkersThatComeAndGoForEverABoundedRestIsKept) {
  constexpr uint32_t kGone = 3000;
  PeerNames names;
  names.add(worker(0));
  for (uint32_t id = 1; id <= kGone; ++id) {
    if (id % 2 == 0) names.add(worker(id));  // others are first heard of when they go
    names.add_gone(worker(id));
    names.add(worker(id));  // a late message of its own
    ASSERT_LE(names.size(), PeerNames::kMostGone + 1);
  }
  ASSERT_NE(names.find(key_of(worker(0))), nullptr) << "who is here stays";
  ASSERT_NE(names.find(key_of(worker(kGone))), nullptr);
  EXPECT_EQ(*names.find(key_of(worker(kGone))), "w3000");
  EXPECT_NE(names.find(key_of(worker(kGone - PeerNames::kMostGone + 1))), nullptr);
  EXPECT_EQ(names.find(key_of(worker(kGone - PeerNames::kMostGone))), nullptr);
}

}  // namespace
}  // namespace weft::internal
