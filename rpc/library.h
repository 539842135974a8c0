#ifndef WEFT_RPC_LIBRARY_H_
#define WEFT_RPC_LIBRARY_H_

// Library: everything that others may call on a worker, and nothing else. Built by ordinary code
// (no registration before main), given to join(), and immutable from then on.
//
//   weft::Library lib("app");
//   lib.def("forward", &forward);                              // callable as "app.forward"
//   lib.def("scale", [k](at::Tensor x) { return x.mul(k); });  // by FunctionRef only
//   lib.class_<Table>("Table").constructor<int64_t>().def("lookup", &Table::lookup);
//   lib.instance("ps0", std::make_shared<Table>(100));         // on("ps0", &Table::lookup)
//   lib.aten();                                                // "aten::add.Tensor" and others
//
// Handlers return a value, void, Status, StatusOr<T> or Future<T> (coroutines too) and may take a
// CallContext& first. Arguments, object and context live until the result, or its future, is
// complete. The turn of an object that is not concurrent ends when its method returns, also when it
// returns a future that is not complete: what completes that may be another call on the object. A
// coroutine keeps its turn until its body ends. A result is what it was when the handler returned it
// (a future, when it completed): tensors that something else holds, too, are copied
// (MethodOptions::results). What a handler throws becomes the caller's error: see weft/common/error.h for the table
// of types; LibTorch's errors keep their text, c10::IndexError is out_of_range,
// c10::OutOfMemoryError resource_exhausted, and so on (internal/codec/exceptions.cc).
//
// Registration errors throw weft::Error: a name that is taken or malformed, two constructors with
// equal kinds, a class that is registered twice or not at all.
//
// Building: one thread. Afterwards all const methods: any thread. Copies share what is registered.

#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/future.h"
#include "weft/rpc/spi/function_ref.h"
#include "weft/rpc/spi/handler.h"
#include "weft/rpc/spi/signature.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/rpc/value.h"

namespace weft {

struct MethodOptions {
  // Short, never waits: runs on the thread that read the request, without a hop to the pool.
  bool inline_ok = false;
  // What becomes of result tensors whose memory is shared (with the object, or a view).
  TensorResults results = TensorResults::kValue;
};

struct InstanceOptions {  // of one named object
  // Calls on the object may run beside each other: it locks for itself. Otherwise they run one at a
  // time, const methods together.
  bool concurrent = false;
};

struct ClassOptions {  // of one class
  // The same of all its objects, named ones and those of remote().
  bool concurrent = false;
};

// A named object.
struct Instance {
  std::string class_name;  // as registered
  std::shared_ptr<void> object;
  bool concurrent = false;
};

template <class T>
class ClassDef;

class WEFT_API Library {
 public:
  using Instance = weft::Instance;  // a named object

  // An empty one, for callers that serve nothing and as the target of merge().
  Library() = default;
  // The name stands before every name registered here. Letters, digits and '_', not first a digit.
  explicit Library(std::string_view name);

  // A function pointer (found again by pointer at call sites that have this library), or an object
  // with one const operator() (found by FunctionRef only).
  template <class F>
  Library& def(std::string_view name, F f, MethodOptions options = {});
  template <class T>
  ClassDef<T> class_(std::string_view name,  // NOLINT(readability-identifier-naming)
                     ClassOptions options = {});
  // T must be registered with class_ before.
  template <class T>
  Library& instance(std::string_view name, std::shared_ptr<T> object, InstanceOptions options = {});
  // Adds all that `other` has. Nothing is added when anything clashes.
  Library& merge(const Library& other);

  // Makes LibTorch's operators callable: all of the allow-list (weft/rpc/aten_operators.h), or
  // those of it that are named, as "aten::add.Tensor".
  Library& aten();
  Library& aten(const std::vector<std::string>& names);

  const std::string& name() const { return name_; }
  // Every method in order of name and signature.
  std::vector<const Method*> methods() const;

  std::vector<std::string> method_names() const;  // sorted

  // The method that a call with this name and signature (by hash) means. Errors: kind not_found,
  // with the nearest name; kind signature, with what is registered.
  StatusOr<const Method*> find(std::string_view name, uint64_t signature_hash) const;
  // The first of that name, or null.
  const Method* find(std::string_view name) const;
  // All of that name (constructors and operators may have several signatures); empty when unknown.
  std::vector<const Method*> find_all(std::string_view name) const;
  // The named object that a call of `method` on it means. Errors: kind not_found when there is none
  // of that name, kind signature when it is of another class, or the method needs an object or
  // takes none.
  StatusOr<const Instance*> find_instance(std::string_view object, const Method& method) const;

  // Null when there is none.
  const Instance* find_instance(std::string_view object) const;

  // The name under which a pointer is registered. `type` is the class meant, or void. Errors: kind
  // not_found when it is not registered, kind invalid_argument when several names or classes have
  // it.
  StatusOr<std::string> name_of(const internal::PointerKey& pointer, std::type_index type,
                                std::string_view signature) const;
  // "app.Table"; kind not_found when the class is not registered.
  StatusOr<std::string> class_name_of(std::type_index type) const;
  // Whether its class says so; false for a type that is not registered.
  bool is_concurrent(std::type_index type) const;

  // What a method does, with a choice of what happens to its result: encoded, or kept as an object.
  // Constructors only keep. Null when `method` is not of this library.
  const internal::Invoker* invoker_of(const Method& method) const;

 private:
  template <class T>
  friend class ClassDef;

  struct PointerTarget {
    std::string name;
    std::type_index type;
  };
  struct ClassEntry {
    std::string name;
    std::type_index type;
    ClassOptions options;
  };
  using Entry = internal::MethodEntry;
  using EntryRef = std::shared_ptr<const Entry>;

  std::string full_name(std::string_view name) const;
  void add(Entry entry, bool overloaded);
  void add_pointer(const internal::PointerKey& key, std::string name, std::type_index type);
  void add_class(std::string name, std::type_index type, ClassOptions options);
  void add_instance(std::string_view name, std::shared_ptr<void> object, std::type_index type,
                    const char* type_name, InstanceOptions options);
  Status unknown(std::string_view name) const;

  std::string name_;
  std::map<std::string, std::vector<EntryRef>, std::less<>> methods_;
  std::multimap<internal::PointerKey, PointerTarget> pointers_;
  std::map<std::string, ClassEntry, std::less<>> classes_;
  std::map<std::string, Instance, std::less<>> instances_;
};

// Returned by Library::class_; used at once.
template <class T>
class ClassDef {
 public:
  // Several may be given; calls choose by wire kinds.
  template <class... Args>
  ClassDef& constructor(MethodOptions options = {});
  // A method of T or of a base of T, const or not.
  template <class F>
  ClassDef& def(std::string_view name, F method, MethodOptions options = {});
  // Called without an object, as "app.Class.name".
  template <class F>
  ClassDef& def_static(std::string_view name, F f, MethodOptions options = {});

 private:
  friend class Library;
  ClassDef(Library* library, std::string name) : library_(library), name_(std::move(name)) {}

  Library* const library_;
  const std::string name_;
};

// ---- templates ---------------------------------------------------------------------------------

template <class F>
Library& Library::def(std::string_view name, F f, MethodOptions options) {
  using Callee = internal::Callee<F>;
  static_assert(Callee::kForm != internal::Form::kNone,
                "weft: def() takes a function, or an object with exactly one operator(); choose an "
                "overload with weft::overload<Args...>(&f)");
  static_assert(Callee::kForm != internal::Form::kMethod,
                "weft: a method is registered with class_<T>(...).def(...)");
  const std::string full = full_name(name);
  internal::MethodEntry entry = internal::make_function_entry(full, f, options.inline_ok);
  entry.method.results = options.results;
  add(std::move(entry), false);
  if constexpr (Callee::kForm == internal::Form::kFunction) {
    add_pointer(internal::PointerKey::of(f), full, typeid(void));
  }
  return *this;
}

template <class T>
ClassDef<T> Library::class_(std::string_view name, ClassOptions options) {
  std::string full = full_name(name);
  add_class(full, typeid(T), options);
  return ClassDef<T>(this, std::move(full));
}

template <class T>
Library& Library::instance(std::string_view name, std::shared_ptr<T> object,
                           InstanceOptions options) {
  static_assert(!std::is_const_v<T>, "weft: a named object is not const");
  add_instance(name, std::move(object), typeid(T), typeid(T).name(), options);
  return *this;
}

template <class T>
template <class... Args>
ClassDef<T>& ClassDef<T>::constructor(MethodOptions options) {
  static_assert(std::is_constructible_v<T, Args...>,
                "weft: the class has no constructor that takes these");
  library_->add(internal::make_constructor_entry<T, Args...>(name_, options.inline_ok), true);
  return *this;
}

template <class T>
template <class F>
ClassDef<T>& ClassDef<T>::def(std::string_view name, F method, MethodOptions options) {
  using Callee = internal::Callee<F>;
  static_assert(Callee::kForm == internal::Form::kMethod,
                "weft: def() of a class takes a method pointer, not volatile and not for rvalues; "
                "choose an overload with weft::overload<Args...>(&T::m) or const_overload");
  static_assert(std::is_base_of_v<typename Callee::Class, T>,
                "weft: the method belongs to another class");
  internal::check_name(name, "method");
  const std::string full = name_ + "." + std::string(name);
  internal::MethodEntry entry = internal::make_method_entry<T>(full, method, options.inline_ok);
  entry.method.class_name = name_;
  entry.method.results = options.results;
  library_->add(std::move(entry), false);
  library_->add_pointer(internal::PointerKey::of(method), full, typeid(T));
  return *this;
}

template <class T>
template <class F>
ClassDef<T>& ClassDef<T>::def_static(std::string_view name, F f, MethodOptions options) {
  using Callee = internal::Callee<F>;
  static_assert(
      Callee::kForm == internal::Form::kFunction || Callee::kForm == internal::Form::kObject,
      "weft: def_static() takes a function");
  internal::check_name(name, "function");
  const std::string full = name_ + "." + std::string(name);
  internal::MethodEntry entry = internal::make_function_entry(full, f, options.inline_ok);
  entry.method.results = options.results;
  library_->add(std::move(entry), false);
  if constexpr (Callee::kForm == internal::Form::kFunction) {
    library_->add_pointer(internal::PointerKey::of(f), full, typeid(void));
  }
  return *this;
}

}  // namespace weft

#endif  // WEFT_RPC_LIBRARY_H_
