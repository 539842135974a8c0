// LibTorch's operators as methods, called directly: which there are, and what they take. No network.

#include "weft/rpc/aten_operators.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/Functions.h"
#include "weft/rpc/library.h"
#include "weft/tests/rpc/direct.h"

namespace weft {
namespace {

TEST(Operators, EveryOperatorOfTheAllowListExists) {
  Library lib("app");
  for (const std::string& name : default_aten_operators()) {
    EXPECT_EQ(refused([&] { lib.aten({name}); }), "accepted") << name;
  }
  EXPECT_GT(lib.methods().size(), default_aten_operators().size());
}

TEST(Operators, TheyAreCalledByName) {
  Library lib("app");
  lib.aten();
  Direct direct(lib);
  const at::Tensor a = at::rand({2, 2});
  const at::Tensor b = at::rand({2, 2});
  const Ref<at::Tensor(at::Tensor, at::Tensor)> add{"aten::add.Tensor"};
  EXPECT_TRUE(at::equal(*direct.call(add, a, b), at::add(a, b)));
  const Ref<at::Tensor(at::Tensor, at::Tensor, at::Scalar)> add_scaled{"aten::add.Tensor"};
  EXPECT_TRUE(at::equal(*direct.call(add_scaled, a, b, 3), at::add(a, b, 3)));
  const Ref<at::Tensor(at::Tensor, std::optional<std::vector<int64_t>>, bool)> sums{
      "aten::sum.dim_IntList"};
  const StatusOr<at::Tensor> summed = direct.call(sums, a, std::vector<int64_t>{0}, true);
  ASSERT_TRUE(summed.ok()) << summed.status();
  EXPECT_TRUE(at::equal(*summed, a.sum({0}, true)));
  const Ref<std::tuple<at::Tensor, at::Tensor>(at::Tensor, int64_t)> max{"aten::max.dim"};
  const auto pair = direct.call(max, a, 1);
  ASSERT_TRUE(pair.ok()) << pair.status();
  EXPECT_TRUE(at::equal(std::get<1>(*pair), std::get<1>(a.max(1))));
  const Ref<std::vector<at::Tensor>(at::Tensor, int64_t)> chunk{"aten::chunk"};
  EXPECT_EQ(direct.call(chunk, a, 2)->size(), 2u);
  const Ref<at::Tensor(std::vector<at::Tensor>, int64_t)> cat{"aten::cat"};
  EXPECT_EQ(direct.call(cat, std::vector<at::Tensor>{a, b}, 1)->sizes(), at::IntArrayRef({2, 4}));
  const Ref<bool(at::Tensor, at::Tensor)> equal{"aten::equal"};
  EXPECT_TRUE(*direct.call(equal, a, a));
  const Ref<at::Tensor(at::Tensor, at::ScalarType)> to{"aten::to.dtype"};
  EXPECT_EQ(direct.call(to, a, at::kDouble)->scalar_type(), at::kDouble);
}

TEST(Operators, TheyTakeTheKeywordArgumentsOfFactories) {
  Library lib("app");
  lib.aten();
  Direct direct(lib);
  const Ref<at::Tensor(std::vector<int64_t>, at::TensorOptions)> ones{"aten::ones"};
  const StatusOr<at::Tensor> leaf = direct.call(ones, std::vector<int64_t>{2, 3},
                                                at::TensorOptions(at::kDouble).requires_grad(true));
  ASSERT_TRUE(leaf.ok()) << leaf.status();
  EXPECT_EQ(leaf->scalar_type(), at::kDouble);
  EXPECT_TRUE(leaf->requires_grad());
  const Ref<at::Tensor(std::vector<int64_t>)> plain{"aten::zeros"};
  EXPECT_EQ(direct.call(plain, std::vector<int64_t>{4})->numel(), 4);
  const Ref<at::Tensor(std::vector<int64_t>, at::TensorOptions)> rand{"aten::rand"};
  EXPECT_EQ(direct.call(rand, std::vector<int64_t>{4}, at::TensorOptions(at::kFloat))->numel(), 4);
  // A gradient of an integer tensor: LibTorch's own words, as an error of the call.
  const Status s =
      direct.call(ones, std::vector<int64_t>{1}, at::TensorOptions(at::kLong).requires_grad(true))
          .status();
  EXPECT_EQ(error_kind(s), ErrorKind::kUser) << s;
}

TEST(Operators, TheyRefuseWhatTheyCannotTake) {
  Library lib("app");
  lib.aten();
  Direct direct(lib);
  const Status kinds =
      direct.call(Ref<at::Tensor(at::Tensor, double)>{"aten::add.Tensor"}, at::ones({1}), 1.0)
          .status();
  EXPECT_EQ(error_kind(kinds), ErrorKind::kSignature);
  EXPECT_NE(kinds.message().find("(tensor,tensor)->tensor or (tensor,tensor,scalar)->tensor"),
            std::string::npos)
      << kinds;
  const Status shapes = direct
                            .call(Ref<at::Tensor(at::Tensor, at::Tensor)>{"aten::mm"},
                                  at::ones({2, 3}), at::ones({2, 3}))
                            .status();
  EXPECT_EQ(error_kind(shapes), ErrorKind::kUser) << shapes;
  const Status undefined =
      direct
          .call(Ref<at::Tensor(at::Tensor, at::Tensor)>{"aten::mm"}, at::Tensor(), at::ones({2, 3}))
          .status();
  EXPECT_EQ(error_kind(undefined), ErrorKind::kProtocol) << undefined;
  const Status dtype =
      direct.call(Ref<at::Tensor(at::Tensor, int)>{"aten::to.dtype"}, at::ones({1}), 9999).status();
  EXPECT_EQ(error_kind(dtype), ErrorKind::kProtocol) << dtype;
  for (const char* name : {"aten::add_.Tensor", "aten::from_file", "aten::save", "aten::empty",
                           "aten::add.out", "prim::print", "no::such"}) {
    EXPECT_NE(refused([&] { lib.aten({name}); }).find("not on the list"), std::string::npos)
        << name;
  }
  EXPECT_EQ(Library("app").find("aten::mm"), nullptr) << "nothing is callable unasked";
}

}  // namespace
}  // namespace weft
