#ifndef WEFT_RREF_REMOTE_MODULE_H_
#define WEFT_RREF_REMOTE_MODULE_H_

// RemoteModule<M>: a torch::nn::Module that lives at another worker, and is used from here.
//
//   weft::Library lib("app");                                          // at every worker
//   weft::module_<torch::nn::Linear>(lib, "Linear")
//       .constructor<int64_t, int64_t>()
//       .def("forward", &torch::nn::LinearImpl::forward);
//
//   weft::RemoteModule<torch::nn::Linear> layer(worker, "ps0/cpu", 20, 30);
//   at::Tensor y = layer.forward(x);                                   // runs at ps0
//   weft::rpc_sync(worker, "trainer1", &train, layer);                 // train(RemoteModule<...>)
//   std::vector<weft::RRef<at::Tensor>> parameters = layer.parameters();
//
// M is the class that a program writes: a holder (torch::nn::Linear, one made by TORCH_MODULE),
// whose Impl is meant, or a Module itself. Where it lives is one string, "worker/device": a name,
// or "rank:1", and a device of that worker ("cpu" when there is none). What must be known of Impl
// is registered by module_(), which adds the methods below; others with def(), as for class_().
//
// A RemoteModule is a shared handle, as an RRef is: it copies, moves, travels and fails as one
// (rref/rref.h). Calls on the module run one at a time. Tensors go where the device map of the
// caller says (JoinOptions::device_maps): a module on a GPU is given tensors that are mapped there.
//
// A program that uses this header has LibTorch's own for its modules (<torch/nn/module.h> at
// least); they are large, so neither this header nor weft.h includes them.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/rpc/call_context.h"
#include "weft/rpc/containers.h"
#include "weft/rpc/library.h"
#include "weft/rref/rref.h"

namespace torch::nn {
class Module;
}

namespace weft {

// Parameters and buffers by name, "layer1.weight", detached from any graph.
using StateDict = std::map<std::string, at::Tensor>;

namespace internal {

template <class M, class = void>
struct ModuleImpl {
  using type = M;
};
// Every holder has this name; Embedding and EmbeddingBag, which TORCH_MODULE did not make, no Impl.
template <class M>
struct ModuleImpl<M, std::void_t<typename M::ContainedType>> {
  using type = typename M::ContainedType;
};

// Whether forward() knows which method is meant; says why not.
template <class Impl>
constexpr bool check_forward() {
  constexpr bool kIsOne = requires { &Impl::forward; };
  static_assert(
      kIsOne,
      "weft: the module's forward is overloaded, a template or not there: register one "
      "with weft::overload<Args...>(&M::forward) and call it by rpc_sync() with the same");
  return kIsOne;
}

struct RemotePlacement {
  std::string worker;  // a name; "" when `rank` says it
  int rank = -1;
  std::string device;
  Destination destination() const { return rank >= 0 ? Destination(rank) : Destination(worker); }
};
// "ps0", "ps0/cpu", "rank:1/cuda:0". Error, kind invalid_argument, with the text.
WEFT_API StatusOr<RemotePlacement> parse_placement(std::string_view placement);

WEFT_API StateDict state_dict_of(const torch::nn::Module& module);
// Throws, kind invalid_argument, naming every key that is missing, unknown, or of another shape;
// nothing is changed then.
WEFT_API void load_state_dict_into(torch::nn::Module& module, const StateDict& state, bool strict);
WEFT_API void move_module(torch::nn::Module& module, const std::string& device);

// A module, for code of its own process.
struct LocalModule {
  std::shared_ptr<torch::nn::Module> module;
  void* object = nullptr;                // as methods of its registered class take it
  const std::type_info* type = nullptr;  // that class
};
// A service that gets modules of its worker from other services; each module says for which it is.
class WEFT_API ModuleHost {
 public:
  virtual ~ModuleHost() = default;
  virtual void host(int64_t key, LocalModule module) = 0;
};
WEFT_API void hand_to_host(const CallContext& context, int64_t key, LocalModule module);

// Impl, with the methods that any worker may call on a module. The names of these methods do not
// clash with those of Module, which has several of each.
template <class Impl>
class Served final : public Impl {
  static_assert(std::is_base_of_v<torch::nn::Module, Impl>,
                "weft: a RemoteModule is of a torch::nn::Module, or of a holder of one");

 public:
  using Impl::Impl;

  std::vector<RRef<at::Tensor>> remote_parameters(const CallContext& context, bool recurse) {
    std::vector<RRef<at::Tensor>> out;
    for (at::Tensor& parameter : this->parameters(recurse)) {
      out.push_back(RRef<at::Tensor>::local(context.worker(), std::move(parameter)));
    }
    return out;
  }
  StateDict remote_state_dict() const { return state_dict_of(*this); }
  void remote_load_state_dict(const StateDict& state, bool strict) {
    load_state_dict_into(*this, state, strict);
  }
  void remote_train(bool on) { this->train(on); }
  bool remote_is_training() const { return this->is_training(); }
  void remote_to(const std::string& device) { move_module(*this, device); }
  void remote_zero_grad(bool set_to_none) { this->zero_grad(set_to_none); }
  void remote_host(const CallContext& context, int64_t key) {
    hand_to_host(context, key, {this->shared_from_this(), this, &typeid(Served)});
  }
};

}  // namespace internal

// What a library says of a module's class.
template <class M>
class ModuleDef {
 public:
  using Impl = typename internal::ModuleImpl<M>::type;
  using Served = internal::Served<Impl>;  // the object at the owner

  explicit ModuleDef(ClassDef<Served> def) : def_(std::move(def)) {
    def_.def("parameters", &Served::remote_parameters)
        .def("state_dict", &Served::remote_state_dict)
        .def("load_state_dict", &Served::remote_load_state_dict)
        .def("train", &Served::remote_train)
        .def("is_training", &Served::remote_is_training)
        .def("to", &Served::remote_to)
        .def("zero_grad", &Served::remote_zero_grad)
        .def("hand_to_host", &Served::remote_host);
  }

  template <class... Args>
  ModuleDef& constructor(MethodOptions options = {}) {
    def_.template constructor<Args...>(options);
    return *this;
  }
  // A method of Impl: "forward" and others.
  template <class F>
  ModuleDef& def(std::string_view name, F method, MethodOptions options = {}) {
    def_.def(name, method, options);
    return *this;
  }

 private:
  ClassDef<Served> def_;
};

template <class M>
ModuleDef<M> module_(Library& library, std::string_view name,  // NOLINT
                     ClassOptions options = {}) {
  return ModuleDef<M>(
      library.class_<internal::Served<typename internal::ModuleImpl<M>::type>>(name, options));
}

template <class M>
class RemoteModule {
 public:
  using Impl = typename internal::ModuleImpl<M>::type;
  using Served = internal::Served<Impl>;  // the object at the owner

  // Refers to nothing.
  RemoteModule() = default;
  // Made there by the constructor for these kinds of arguments; returns at once, as remote() does:
  // what fails is found at the first use. On another device than the CPU it waits until the module
  // is there. Throws for a placement that is none, and what remote() throws.
  template <class... Args>
  RemoteModule(const Worker& worker, std::string_view placement, const Args&... args) {
    const internal::RemotePlacement at = value_or_throw(internal::parse_placement(placement));
    module_ = weft::remote<Served>(worker, at.destination(), args...);
    if (at.device != "cpu") to(at.device);
  }

  // Wraps a module that exists already.
  explicit RemoteModule(RRef<Served> module) : module_(std::move(module)) {}

  // ---- of the module: as in LibTorch, at its worker ----

  template <class... Args>
  auto forward(const Args&... args) const {
    if constexpr (internal::check_forward<Impl>()) {
      return module_.rpc_sync(&Impl::forward, args...);
    } else {
      return internal::Refused();
    }
  }
  template <class... Args>  // as a future
  auto forward_async(const Args&... args) const {
    if constexpr (internal::check_forward<Impl>()) {
      return module_.rpc_async(&Impl::forward, args...);
    } else {
      return internal::Refused();
    }
  }
  // Any method that is registered, as of an RRef: (&Impl::m, args...), or with CallOptions first.
  template <class... Args>
  auto rpc_sync(const Args&... args) const {
    return module_.rpc_sync(args...);
  }
  template <class... Args>
  auto rpc_async(const Args&... args) const {
    return module_.rpc_async(args...);
  }
  // The result stays at the module's worker.
  template <class... Args>
  auto remote(const Args&... args) const {
    return module_.remote(args...);
  }
  // Its parameters where they are, in LibTorch's order: for an optimizer, which runs there.
  std::vector<RRef<at::Tensor>> parameters(bool recurse = true) const {
    return module_.rpc_sync(&Served::remote_parameters, recurse);
  }
  StateDict state_dict() const { return module_.rpc_sync(&Served::remote_state_dict); }
  // `strict`: every key of the module is there, and no other.
  void load_state_dict(const StateDict& state, bool strict = true) const {
    module_.rpc_sync(&Served::remote_load_state_dict, state, strict);
  }
  void train(bool on = true) const { module_.rpc_sync(&Served::remote_train, on); }
  void eval() const { train(false); }
  bool is_training() const { return module_.rpc_sync(&Served::remote_is_training); }
  // To another device of its worker.
  void to(std::string_view device) const {
    module_.rpc_sync(&Served::remote_to, std::string(device));
  }
  void zero_grad(bool set_to_none = true) const {
    module_.rpc_sync(&Served::remote_zero_grad, set_to_none);
  }

  // ---- of the reference ----

  explicit operator bool() const { return module_.valid(); }
  WorkerInfo owner() const { return module_.owner(); }             // where it lives
  std::string owner_name() const { return module_.owner_name(); }  // its name
  bool is_owner() const { return module_.is_owner(); }             // it lives here
  const RRef<Served>& rref() const { return module_; }
  // The module itself, at its worker.
  std::shared_ptr<Impl> local_value(Timeout deadline = {}) const {
    return module_.local_value(deadline);
  }
  friend bool operator==(const RemoteModule&, const RemoteModule&) = default;

 private:
  friend struct Codec<RemoteModule<M>>;

  RRef<Served> module_;
};

// As the RRef that it is.
template <class M>
struct Codec<RemoteModule<M>> {
  using Ref = RRef<typename RemoteModule<M>::Served>;
  static constexpr auto kKind = Codec<Ref>::kKind;
  static void encode(Encoder& out, const RemoteModule<M>& value) {
    Codec<Ref>::encode(out, value.module_);
  }
  static StatusOr<RemoteModule<M>> decode(Decoder& in) {
    RemoteModule<M> out;
    WEFT_ASSIGN_OR_RETURN(out.module_, Codec<Ref>::decode(in));
    return out;
  }
};

}  // namespace weft

#endif  // WEFT_RREF_REMOTE_MODULE_H_
