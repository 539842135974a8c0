// The library and its handlers, called directly: what can be registered, how it is found, what a
// call of each kind of handler does, and what becomes of every kind of exception. No network.

#include "weft/rpc/library.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "c10/util/Exception.h"
#include "weft/common/trace_context.h"
#include "weft/rpc/call.h"
#include "weft/rpc/worker.h"
#include "weft/tests/rpc/direct.h"

namespace app {

using weft::CallContext;
using weft::Future;

struct Point {
  int x = 0;
  int y = 0;
};
WEFT_STRUCT(Point, x, y);

int add(int a, int b) { return a + b; }
int add_fast(const int& a, int b) noexcept { return a + b; }
at::Tensor forward(const at::Tensor& x, double scale) { return x.mul(scale); }
void nothing() {}
std::string shout(std::string_view text, c10::ArrayRef<int64_t> times) {
  std::string out(text);
  for (const int64_t t : times) out += std::to_string(t);
  return out;
}
std::string who(CallContext& context, std::string greeting) {
  return greeting + " " + context.caller().name;
}
absl::StatusOr<int> maybe(bool good) {
  if (good) return 1;
  return absl::NotFoundError("no luck");
}
absl::Status check(bool good) { return good ? absl::OkStatus() : absl::DataLossError("bad"); }
int8_t narrow(int8_t v) { return v; }
Point mirror(Point p) { return {p.y, p.x}; }

int over(int v) { return v; }
std::string over(std::string v) { return v + "!"; }

Future<int> ready(int v) { return Future<int>::ready(v); }

struct Base {
  int plain(int v) { return v + base; }
  virtual int virt(int v) { return v; }
  virtual ~Base() = default;
  int base = 100;
};
struct Table : Base {
  Table() = default;
  explicit Table(int64_t rows) : rows_(rows) {}
  Table(int64_t rows, std::string label) : rows_(rows), label_(std::move(label)) {}
  int64_t rows() const { return rows_; }
  const std::string& label() const& noexcept { return label_; }
  void grow(int64_t by) { rows_ += by; }
  int virt(int v) override { return -v; }
  int64_t get(int64_t i) { return i; }
  int64_t get(int64_t i) const { return -i; }
  Future<int64_t> later(CallContext& context) {
    (void)context;
    return Future<int64_t>::ready(rows_);
  }
  static int twice(int v) { return 2 * v; }

  int64_t rows_ = 7;
  std::string label_ = "none";
};
struct Other : Base {};

}  // namespace app

namespace weft {
namespace {

Library everything() {
  Library lib("app");
  lib.def("add", &app::add);
  lib.def("add_fast", &app::add_fast, {.inline_ok = true});
  lib.def("forward", &app::forward);
  lib.def("nothing", &app::nothing);
  lib.def("shout", &app::shout);
  lib.def("who", &app::who);
  lib.def("maybe", &app::maybe);
  lib.def("check", &app::check);
  lib.def("narrow", &app::narrow);
  lib.def("mirror", &app::mirror);
  lib.def("ready", &app::ready);
  lib.def("over_int", overload<int>(&app::over));
  lib.def("over_text", overload<std::string>(&app::over));
  lib.class_<app::Table>("Table")
      .constructor<>()
      .constructor<int64_t>()
      .constructor<int64_t, std::string>()
      .def("rows", &app::Table::rows)
      .def("label", &app::Table::label)
      .def("grow", &app::Table::grow)
      .def("plain", &app::Table::plain)
      .def("virt", &app::Base::virt)
      .def("get", overload<int64_t>(&app::Table::get))
      .def("peek", const_overload<int64_t>(&app::Table::get))
      .def("later", &app::Table::later)
      .def_static("twice", &app::Table::twice);
  return lib;
}

std::string signature_in(const Library& lib, std::string_view name) {
  const Method* m = lib.find(name);
  return m == nullptr ? "" : m->signature;
}

TEST(Library, SignaturesConsistOfWireKinds) {
  const Library lib = everything();
  EXPECT_EQ(signature_in(lib, "app.add"), "(int,int)->int");
  EXPECT_EQ(signature_in(lib, "app.add_fast"), "(int,int)->int");
  EXPECT_EQ(signature_in(lib, "app.forward"), "(tensor,float)->tensor");
  EXPECT_EQ(signature_in(lib, "app.nothing"), "()->none");
  EXPECT_EQ(signature_in(lib, "app.shout"), "(string,list<int>)->string");
  EXPECT_EQ(signature_in(lib, "app.who"), "(string)->string");
  EXPECT_EQ(signature_in(lib, "app.maybe"), "(bool)->int");
  EXPECT_EQ(signature_in(lib, "app.check"), "(bool)->none");
  EXPECT_EQ(signature_in(lib, "app.ready"), "(int)->int");
  EXPECT_EQ(signature_in(lib, "app.mirror"), "(Point)->Point");
  EXPECT_EQ(signature_in(lib, "app.Table.later"), "()->int");
  EXPECT_EQ(signature_in(lib, "app.Table.label"), "()->string");
  EXPECT_TRUE(lib.find("app.Table.rows")->is_const);
  EXPECT_FALSE(lib.find("app.Table.grow")->is_const);
  EXPECT_EQ(lib.find("app.Table.rows")->class_name, "app.Table");
  EXPECT_EQ(lib.find("app.Table.twice")->class_name, "");
  EXPECT_TRUE(lib.find("app.add_fast")->inline_ok);
  EXPECT_EQ(lib.find_all("app.Table").size(), 3u);
  EXPECT_EQ(signature_of<decltype(&app::Table::later)>(), "()->int");
  EXPECT_EQ(signature_of<int(uint8_t)>(), "(int)->int");
}

TEST(Library, HandlersOfEveryShapeAreCalled) {
  const Library lib = everything();
  Direct direct(lib);
  EXPECT_EQ(*direct.call(Ref<int(int, int)>{"app.add"}, 2, 3), 5);
  EXPECT_EQ(*direct.call(Ref<int(int, int)>{"app.add_fast"}, 2, 3), 5);
  EXPECT_TRUE(direct.call(Ref<void()>{"app.nothing"}).ok());
  EXPECT_EQ(*direct.call(Ref<std::string(std::string, std::vector<int>)>{"app.shout"}, "a",
                         std::vector<int>{1, 2}),
            "a12");
  EXPECT_EQ(*direct.call(Ref<std::string(std::string)>{"app.who"}, "hello"), "hello caller");
  EXPECT_EQ(*direct.call(Ref<int(bool)>{"app.maybe"}, true), 1);
  EXPECT_TRUE(direct.call(Ref<void(bool)>{"app.check"}, true).ok());
  EXPECT_EQ(*direct.call(Ref<int(int)>{"app.ready"}, 9), 9);
  EXPECT_EQ(direct.call(Ref<app::Point(app::Point)>{"app.mirror"}, app::Point{1, 2})->x, 2);
  EXPECT_EQ(*direct.call(Ref<int(int)>{"app.over_int"}, 4), 4);
  EXPECT_EQ(*direct.call(Ref<std::string(std::string)>{"app.over_text"}, "x"), "x!");
  const StatusOr<at::Tensor> y =
      direct.call(Ref<at::Tensor(at::Tensor, float)>{"app.forward"}, at::ones({3}), 2);
  ASSERT_TRUE(y.ok()) << y.status();
  EXPECT_TRUE(at::equal(*y, at::full({3}, 2.0F)));
}

TEST(Library, MethodsOfObjectsAreCalled) {
  const Library lib = everything();
  Direct direct(lib);
  const auto table = std::make_shared<app::Table>(3);
  EXPECT_EQ(*direct.call_on(table, Ref<int64_t()>{"app.Table.rows"}), 3);
  EXPECT_TRUE(direct.call_on(table, Ref<void(int)>{"app.Table.grow"}, 4).ok());
  EXPECT_EQ(table->rows(), 7);
  EXPECT_EQ(*direct.call_on(table, Ref<std::string()>{"app.Table.label"}), "none");
  EXPECT_EQ(*direct.call_on(table, Ref<int(int)>{"app.Table.plain"}, 1), 101);
  EXPECT_EQ(*direct.call_on(table, Ref<int(int)>{"app.Table.virt"}, 1), -1);
  EXPECT_EQ(*direct.call_on(table, Ref<int(int)>{"app.Table.get"}, 5), 5);
  EXPECT_EQ(*direct.call_on(table, Ref<int(int)>{"app.Table.peek"}, 5), -5);
  EXPECT_EQ(*direct.call_on(table, Ref<int()>{"app.Table.later"}), 7);
  EXPECT_EQ(*direct.call(Ref<int(int)>{"app.Table.twice"}, 21), 42);
}

TEST(Library, CallableObjectsKeepTheirState) {
  Library lib("app");
  const auto counter = std::make_shared<int>(0);
  lib.def("count", [counter](int by) { return *counter += by; });
  lib.def("function", std::function<int(int)>([](int v) { return v * v; }));
  lib.def("plain", [](CallContext& context) { return context.call_id(); });
  Direct direct(lib);
  EXPECT_EQ(*direct.call(Ref<int(int)>{"app.count"}, 2), 2);
  EXPECT_EQ(*direct.call(Ref<int(int)>{"app.count"}, 3), 5);
  EXPECT_EQ(*direct.call(Ref<int(int)>{"app.function"}, 3), 9);
  EXPECT_EQ(*direct.call(Ref<uint64_t()>{"app.plain"}), 7u);
}

TEST(Library, ConstructorsAreChosenByWireKinds) {
  const Library lib = everything();
  const Worker worker;
  const CallContext unused(worker, WorkerInfo{}, 1, std::make_shared<CallScope>(),
                           absl::Seconds(1));
  const auto make = [&](std::string_view signature,
                        Payload arguments) -> StatusOr<std::shared_ptr<void>> {
    const StatusOr<const Method*> m = lib.find("app.Table", signature_hash(signature));
    if (!m.ok()) return m.status();
    StatusOr<KeptObject> made = absl::UnknownError("no reply");
    (*lib.invoker_of(**m))(
        const_cast<CallContext&>(unused), nullptr, std::move(arguments),
        internal::Outcome(KeepFn([&made](StatusOr<KeptObject> r) { made = std::move(r); })));
    if (!made.ok()) return made.status();
    EXPECT_EQ(*made->type, typeid(app::Table));
    return made->object;
  };
  const auto arguments = [](const auto&... args) {
    Payload payload;
    Encoder out(&payload);
    out.put(std::make_tuple(args...));
    return payload;
  };
  auto one = make("(int)->app.Table", arguments(5));
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(static_cast<app::Table*>(one->get())->rows(), 5);
  auto two = make("(int,string)->app.Table", arguments(6, std::string("six")));
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_EQ(static_cast<app::Table*>(two->get())->label_, "six");
  const Status none = make("(string)->app.Table", arguments(std::string("x"))).status();
  EXPECT_EQ(error_kind(none), ErrorKind::kSignature);
  EXPECT_NE(none.message().find("()->app.Table or (int)->app.Table or (int,string)->app.Table"),
            std::string::npos)
      << none;
  // As an ordinary call there is nothing that could come back.
  Direct direct(lib);
  UntypedCall call;
  call.method = "app.Table";
  call.signature = "()->app.Table";
  call.arguments = arguments();
  EXPECT_EQ(error_kind(direct.run(std::move(call)).status()), ErrorKind::kInvalidArgument);
}

// ---- exceptions --------------------------------------------------------------------------------

struct NotStandard {};

Status thrown(const std::function<void()>& body) {
  Library lib("app");
  lib.def("f", body);
  Direct direct(lib);
  return direct.call(Ref<void()>{"app.f"}).status();
}

TEST(Library, X7_every_exception_becomes_a_status_by_one_table) {
  using Code = absl::StatusCode;
  const std::string odd("nul \0 and \xff\xfe bytes", 18);
  const std::vector<std::pair<std::function<void()>, Code>> rows = {
      {[] { throw std::invalid_argument("m"); }, Code::kInvalidArgument},
      {[] { throw std::domain_error("m"); }, Code::kInvalidArgument},
      {[] { throw std::out_of_range("m"); }, Code::kOutOfRange},
      {[] { throw std::length_error("m"); }, Code::kOutOfRange},
      {[] { throw std::overflow_error("m"); }, Code::kOutOfRange},
      {[] { throw std::bad_alloc(); }, Code::kResourceExhausted},
      {[] { throw std::runtime_error("m"); }, Code::kUnknown},
      {[] { throw std::logic_error("m"); }, Code::kUnknown},
      {[] { throw 42; }, Code::kUnknown},
      {[] { throw NotStandard(); }, Code::kUnknown},
      {[] { throw "text"; }, Code::kUnknown},
      {[] { throw Error(Code::kAlreadyExists, "m"); }, Code::kAlreadyExists},
      {[] { TORCH_CHECK(false, "m"); }, Code::kUnknown},
      {[] { TORCH_CHECK_INDEX(false, "m"); }, Code::kOutOfRange},
      {[] { TORCH_CHECK_VALUE(false, "m"); }, Code::kInvalidArgument},
      {[] { TORCH_CHECK_TYPE(false, "m"); }, Code::kInvalidArgument},
      {[] { TORCH_CHECK_LINALG(false, "m"); }, Code::kInvalidArgument},
      {[] { TORCH_CHECK_NOT_IMPLEMENTED(false, "m"); }, Code::kUnimplemented},
      {[] { TORCH_CHECK_WITH(OutOfMemoryError, false, "m"); }, Code::kResourceExhausted},
      {[] { TORCH_CHECK_WITH(EnforceFiniteError, false, "m"); }, Code::kOutOfRange},
      {[] { TORCH_CHECK_WITH(DistNetworkError, false, "m"); }, Code::kUnavailable},
      {[] { TORCH_CHECK_WITH(DistStoreError, false, "m"); }, Code::kUnavailable},
  };
  for (size_t i = 0; i < rows.size(); ++i) {
    const Status s = thrown(rows[i].first);
    EXPECT_EQ(s.code(), rows[i].second) << "row " << i << ": " << s;
    EXPECT_EQ(error_kind(s), ErrorKind::kUser) << "row " << i;
    EXPECT_FALSE(s.message().empty()) << "row " << i;
  }
  EXPECT_EQ(thrown([&] { throw std::runtime_error(odd.c_str()); }).message(), "nul ");
  EXPECT_EQ(thrown([&] { throw Error(Code::kAborted, odd); }).message(), odd);
  const std::string huge(1 << 20, 'm');
  EXPECT_EQ(thrown([&] { throw std::runtime_error(huge); }).message(), huge);
  const Status with = thrown([] { throw Error(Code::kAborted, "m").with_payload("extra"); });
  EXPECT_EQ(error_details(with).payload, "extra");
}

TEST(Library, X7_a_torch_error_keeps_its_text_and_loses_paths) {
  const Status s = thrown([] { at::ones({2, 3}).mm(at::ones({2, 3})); });
  EXPECT_NE(s.message().find("mat1 and mat2 shapes cannot be multiplied"), std::string::npos) << s;
  EXPECT_EQ(s.message().find("Exception raised"), std::string::npos) << s;
  const std::string trace = error_details(s).remote_trace;
  EXPECT_NE(trace.find("frame #"), std::string::npos) << trace;
  EXPECT_EQ(trace.find('/'), std::string::npos) << trace;
  EXPECT_EQ(trace.find("0x7f"), std::string::npos) << trace;
}

// ---- arguments ---------------------------------------------------------------------------------

TEST(Library, IntegersAreCheckedBeforeTheyAreNarrowed) {
  const Library lib = everything();
  Direct direct(lib);
  const Ref<int8_t(int8_t)> narrow{"app.narrow"};
  EXPECT_EQ(*direct.call(narrow, 127), 127);
  EXPECT_EQ(*direct.call(narrow, 3.9), 3);
  for (const Status& s :
       {direct.call(narrow, 300).status(), direct.call(narrow, -129L).status(),
        direct.call(narrow, 1e9).status(), direct.call(narrow, UINT64_MAX).status()}) {
    EXPECT_EQ(s.code(), absl::StatusCode::kOutOfRange) << s;
    EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << s;
    EXPECT_EQ(s.message().find("argument 0 of 'app.narrow': "), 0u) << s;
  }
  // Again at the callee, when the caller had a wider type.
  const Status late = direct.call(Ref<int(int)>{"app.narrow"}, 300).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kOutOfRange) << late;
}

TEST(Library, BadBytesAsArgumentsAreAnErrorOfTheCall) {
  const Library lib = everything();
  Direct direct(lib);
  UntypedCall call;
  call.method = "app.add";
  call.signature = "(int,int)->int";
  for (const std::string& body : {std::string(), std::string("\x0b\x01\x03\x02", 4),
                                  std::string("\x0b\x02\x03\x02\x03\x02\x00", 7)}) {
    call.arguments = Payload{body, {}};
    const Status s = direct.run(call).status();
    EXPECT_EQ(error_kind(s), ErrorKind::kProtocol) << s;
    EXPECT_EQ(s.message().find("arguments: "), 0u) << s;
  }
}

TEST(Library, AWrongSignatureNamesWhatIsRegistered) {
  const Library lib = everything();
  Direct direct(lib);
  const Status s = direct.call(Ref<int(std::string)>{"app.add"}, "x").status();
  EXPECT_EQ(error_kind(s), ErrorKind::kSignature);
  EXPECT_EQ(s.message(), "'app.add' is registered as (int,int)->int");
}

TEST(Library, AnUnknownNameSuggestsTheNearest) {
  const Library lib = everything();
  const Status near = lib.find("app.forwrad", 0).status();
  EXPECT_EQ(error_kind(near), ErrorKind::kNotFound);
  EXPECT_EQ(near.message(), "no function 'app.forwrad' is registered; did you mean 'app.forward'?");
  EXPECT_EQ(lib.find("x", 0).status().message(), "no function 'x' is registered");
  const Status odd = lib.find(std::string(1 << 20, '\n'), 0).status();
  EXPECT_LT(odd.message().size(), 300u);
  EXPECT_EQ(odd.message().find('\n'), std::string::npos);
  EXPECT_EQ(Library().find("x", 0).status().message(), "no function 'x' is registered");
}

// ---- pointers ----------------------------------------------------------------------------------

template <class F>
StatusOr<std::string> name_of(const Library& lib, F f, std::type_index type = typeid(void)) {
  return lib.name_of(internal::PointerKey::of(f), type, signature_of<F>());
}

TEST(Library, PointersAreFoundByTypeAndBytes) {
  const Library lib = everything();
  EXPECT_EQ(*name_of(lib, &app::add), "app.add");
  EXPECT_EQ(*name_of(lib, &app::add_fast), "app.add_fast");
  EXPECT_EQ(*name_of(lib, overload<int>(&app::over)), "app.over_int");
  EXPECT_EQ(*name_of(lib, &app::Table::rows), "app.Table.rows");
  EXPECT_EQ(*name_of(lib, overload<int64_t>(&app::Table::get)), "app.Table.get");
  EXPECT_EQ(*name_of(lib, const_overload<int64_t>(&app::Table::get)), "app.Table.peek");
  EXPECT_EQ(*name_of(lib, &app::Base::plain), "app.Table.plain");
  EXPECT_EQ(*name_of(lib, &app::Table::twice), "app.Table.twice");
  const Status unknown = name_of(
                             lib, +[](int) { return 0; })
                             .status();
  EXPECT_EQ(error_kind(unknown), ErrorKind::kNotFound);
  EXPECT_NE(unknown.message().find("FunctionRef"), std::string::npos) << unknown;
  EXPECT_NE(unknown.message().find("(int)->int"), std::string::npos) << unknown;
}

TEST(Library, ErrorsHaveTheNamesOfTheSource) {
  // A function of a shared library has a symbol that can be asked for.
  const Status function = name_of(Library("app"), &span_text).status();
  EXPECT_NE(function.message().find("'weft::span_text(unsigned long)'"), std::string::npos)
      << function;
  const Status type = Library("app").class_name_of(typeid(app::Table)).status();
  EXPECT_NE(type.message().find("app::Table is not registered"), std::string::npos) << type;
}

TEST(Library, AnAmbiguousPointerIsAnErrorThatSaysWhatToUse) {
  Library lib("app");
  lib.def("one", &app::add).def("two", &app::add);
  lib.class_<app::Table>("Table").def("plain", &app::Base::plain);
  lib.class_<app::Other>("Other").def("plain", &app::Base::plain);
  const Status twice = name_of(lib, &app::add).status();
  EXPECT_EQ(error_kind(twice), ErrorKind::kInvalidArgument);
  EXPECT_NE(twice.message().find("'app.one', 'app.two'"), std::string::npos) << twice;
  EXPECT_NE(twice.message().find("FunctionRef"), std::string::npos) << twice;
  // A method inherited by two classes: the class decides.
  EXPECT_FALSE(name_of(lib, &app::Base::plain).ok());
  EXPECT_EQ(*name_of(lib, &app::Base::plain, typeid(app::Other)), "app.Other.plain");
}

// ---- registration errors -----------------------------------------------------------------------

TEST(Library, RegistrationErrorsAreThrown) {
  const auto has = [](const std::string& text, std::string_view words) {
    EXPECT_NE(text.find(words), std::string::npos) << text;
  };
  has(refused([] { Library("app").def("f", &app::add).def("f", &app::nothing); }),
      "the function 'app.f' is already registered");
  has(refused([] {
        Library lib("app");
        lib.class_<app::Table>("T").constructor<int64_t>().constructor<int>();
      }),
      "with equal wire kinds, 'app.T(int)->app.T' is already registered");
  has(refused([] {
        Library lib("app");
        lib.class_<app::Table>("T").def("rows", &app::Table::rows).def("rows", &app::Table::rows);
      }),
      "already registered");
  has(refused([] {
        Library lib("app");
        lib.class_<app::Table>("T");
        lib.class_<app::Table>("U");
      }),
      "already registered");
  has(refused([] {
        Library lib("app");
        lib.class_<app::Table>("T");
        lib.def("T", &app::add);
      }),
      "already registered");
  for (const char* name : {"", "1f", "a b", "a.b", "a-b", "\xff", "@x"}) {
    has(refused([name] { Library("app").def(name, &app::add); }), "is not a name");
    has(refused([name] { Library lib(name); }), "is not a name");
    has(refused([name] { Library("app").class_<app::Table>(name); }), "is not a name");
  }
  has(refused([] { Library("app").def(std::string(129, 'x'), &app::add); }), "at most 128");
  has(refused([] { Library().def("f", &app::add); }), "library without a name");
  has(refused([] { Library("app").instance("t", std::make_shared<app::Table>()); }),
      "is not registered: call class_<T>(...) first");
  has(refused([] {
        Library lib("app");
        lib.class_<app::Table>("T");
        lib.instance("t", std::shared_ptr<app::Table>());
      }),
      "is null");
  has(refused([] {
        Library lib("app");
        lib.class_<app::Table>("T");
        lib.instance("t", std::make_shared<app::Table>())
            .instance("t", std::make_shared<app::Table>());
      }),
      "the object 't' is already registered");
}

TEST(Library, NamedObjects) {
  Library lib("app");
  lib.class_<app::Table>("Table").def("rows", &app::Table::rows);
  lib.class_<app::Other>("Other").def("plain", &app::Base::plain);
  lib.def("add", &app::add);
  lib.instance("ps-0", std::make_shared<app::Table>(9), {.concurrent = true});
  const Method& rows = *lib.find("app.Table.rows");
  const StatusOr<const Instance*> found = lib.find_instance("ps-0", rows);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE((*found)->concurrent);
  EXPECT_EQ((*found)->class_name, "app.Table");
  EXPECT_FALSE(lib.is_concurrent(typeid(app::Table)));
  Library locks("locks");
  locks.class_<app::Table>("Table", {.concurrent = true}).def("rows", &app::Table::rows);
  locks.instance("t", std::make_shared<app::Table>(1));
  EXPECT_TRUE(locks.find_instance("t")->concurrent) << "as its class says";
  Library merged;
  merged.merge(locks);
  EXPECT_TRUE(merged.is_concurrent(typeid(app::Table)));
  EXPECT_FALSE(merged.is_concurrent(typeid(app::Other)));
  Direct direct(lib);
  EXPECT_EQ(*direct.call_on((*found)->object, Ref<int()>{"app.Table.rows"}), 9);
  EXPECT_EQ(error_kind(lib.find_instance("ps-1", rows).status()), ErrorKind::kNotFound);
  EXPECT_NE(lib.find_instance("ps-1", rows).status().message().find("did you mean 'ps-0'"),
            std::string::npos);
  EXPECT_EQ(error_kind(lib.find_instance("", rows).status()), ErrorKind::kSignature);
  EXPECT_EQ(error_kind(lib.find_instance("ps-0", *lib.find("app.add")).status()),
            ErrorKind::kSignature);
  EXPECT_EQ(error_kind(lib.find_instance("ps-0", *lib.find("app.Other.plain")).status()),
            ErrorKind::kSignature);
  EXPECT_EQ(*lib.find_instance("", *lib.find("app.add")), nullptr);
}

TEST(Library, LibrariesMerge) {
  Library app("app");
  app.def("add", &app::add).aten({"aten::add.Tensor"});
  app.class_<app::Table>("Table").constructor<>().def("rows", &app::Table::rows);
  app.instance("t", std::make_shared<app::Table>());
  Library other("other");
  other.def("add", &app::add_fast).aten({"aten::add.Tensor", "aten::mm"});
  Library all;
  all.merge(app).merge(other);
  EXPECT_EQ(*name_of(all, &app::add), "app.add");
  EXPECT_EQ(*name_of(all, &app::add_fast), "other.add");
  EXPECT_NE(all.find("aten::mm"), nullptr);
  EXPECT_NE(all.find_instance("t"), nullptr);
  Direct direct(all);
  EXPECT_EQ(*direct.call(Ref<int(int, int)>{"other.add"}, 1, 2), 3);
  Library again("app");
  again.def("sub", &app::add).def("add", &app::add);
  const size_t before = all.methods().size();
  EXPECT_NE(refused([&] { all.merge(again); }).find("'app.add' is already registered"),
            std::string::npos);
  EXPECT_EQ(all.methods().size(), before) << "a merge that fails changes nothing";
}

}  // namespace
}  // namespace weft
