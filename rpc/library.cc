#include "weft/rpc/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_replace.h"
#include "c10/util/Type.h"
#include "weft/rpc/internal/aten/operators.h"
#include "weft/rpc/internal/codec/text.h"

namespace weft {
namespace {

using internal::cat;

constexpr size_t kMaxName = 128;

bool legal(std::string_view name) {
  if (name.empty() || name.size() > kMaxName) return false;
  if (name[0] >= '0' && name[0] <= '9') return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  });
}

// " 'app::add(long, long)'" where the program tells the names of its functions (-rdynamic, a shared
// library), else "". A pointer to a virtual function is an odd number.
std::string symbol_of(const internal::PointerKey& pointer) {
  uintptr_t address = 0;
  std::memcpy(&address, pointer.bytes.data(), sizeof address);
  Dl_info found = {};
  if (address == 0 || (address & 1) != 0) return "";
  if (dladdr(reinterpret_cast<void*>(address), &found) == 0) return "";
  if (found.dli_sname == nullptr || reinterpret_cast<uintptr_t>(found.dli_saddr) != address) {
    return "";
  }
  return cat(" '", absl::StrReplaceAll(c10::demangle(found.dli_sname), {{"[abi:cxx11]", ""}}), "'");
}

[[noreturn]] void taken(std::string_view what, std::string_view name) {
  throw_error(make_error(absl::StatusCode::kAlreadyExists, ErrorKind::kInvalidArgument,
                         cat(what, " '", name, "' is already registered")));
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

// ", did you mean 'x'?" or nothing.
template <class Map>
std::string suggestion(const Map& known, std::string_view name) {
  if (name.size() > kMaxName) return "";
  size_t best = std::max<size_t>(2, name.size() / 3) + 1;
  std::string_view nearest;
  for (const auto& [candidate, ignored] : known) {
    const size_t longer = std::max(candidate.size(), name.size());
    if (longer - std::min(candidate.size(), name.size()) >= best) continue;
    const size_t distance = edit_distance(name, candidate);
    if (distance < best) {
      best = distance;
      nearest = candidate;
    }
  }
  return nearest.empty() ? "" : cat("; did you mean '", nearest, "'?");
}

// Names that a peer sent go into errors and logs: printable and of bounded length.
std::string shown(std::string_view name) {
  std::string out;
  for (const char c : name.substr(0, kMaxName)) out.push_back(c >= ' ' && c <= '~' ? c : '?');
  if (name.size() > kMaxName) out.append("...");
  return out;
}

}  // namespace

uint64_t signature_hash(std::string_view signature) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : signature) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 1099511628211u;
  }
  return hash;
}

namespace internal {

void check_name(std::string_view name, std::string_view what) {
  if (legal(name)) return;
  throw_error(
      make_error(ErrorKind::kInvalidArgument, cat("'", shown(name), "' is not a name for a ", what,
                                                  ": letters, digits "
                                                  "and '_', not first a digit, at most ",
                                                  kMaxName, " characters")));
}

void Outcome::fail(Status error) {
  if (keeps()) {
    keep_(std::move(error));
  } else {
    reply_(std::move(error));
  }
}

void Outcome::done(KeptObject object) { keep_(std::move(object)); }

void Outcome::done(Payload result, const Status& encoded) {
  if (!encoded.ok()) {
    reply_(annotate(encoded, "the handler's result"));
  } else {
    reply_(std::move(result));
  }
}

MethodEntry make_entry(std::string name, std::string_view signature, bool inline_ok,
                       Invoker invoker) {
  MethodEntry entry;
  entry.method.name = std::move(name);
  entry.method.signature = std::string(signature);
  entry.signature_hash = weft::signature_hash(signature);
  entry.method.inline_ok = inline_ok;
  entry.invoker = std::move(invoker);
  entry.method.invoke = [invoker = entry.invoker](CallContext& context,
                                                  const std::shared_ptr<void>& object,
                                                  Payload arguments, ReplyFn reply) {
    invoker(context, object, std::move(arguments), Outcome(std::move(reply)));
  };
  return entry;
}

}  // namespace internal

Library::Library(std::string_view name) : name_(name) { internal::check_name(name, "library"); }

std::string Library::full_name(std::string_view name) const {
  if (name_.empty()) {
    throw_error(
        make_error(ErrorKind::kInvalidArgument, cat("'", shown(name),
                                                    "' cannot be registered in a library without a "
                                                    "name: make it with Library(\"name\")")));
  }
  internal::check_name(name, "function or class");
  return cat(name_, ".", name);
}

void Library::add(Entry entry, bool overloaded) {
  if (!overloaded && classes_.count(entry.method.name) != 0) taken("the class", entry.method.name);
  std::vector<EntryRef>& same_name = methods_[entry.method.name];
  if (!overloaded && !same_name.empty()) taken("the function", entry.method.name);
  for (const EntryRef& other : same_name) {
    if (other->method.signature == entry.method.signature) {
      taken("with equal wire kinds,", entry.method.name + entry.method.signature);
    }
  }
  same_name.push_back(std::make_shared<const Entry>(std::move(entry)));
  std::sort(same_name.begin(), same_name.end(), [](const EntryRef& a, const EntryRef& b) {
    return a->method.signature < b->method.signature;
  });
}

void Library::add_pointer(const internal::PointerKey& key, std::string name, std::type_index type) {
  pointers_.emplace(key, PointerTarget{std::move(name), type});
}

void Library::add_class(std::string name, std::type_index type, ClassOptions options) {
  for (const auto& [other, entry] : classes_) {
    if (other == name) taken("the class", name);
    if (entry.type == type) taken(cat("the type of class '", name, "', as"), other);
  }
  if (methods_.count(name) != 0) taken("the function", name);
  classes_.emplace(name, ClassEntry{name, type, options});
}

void Library::add_instance(std::string_view name, std::shared_ptr<void> object,
                           std::type_index type, const char* type_name, InstanceOptions options) {
  if (name.empty() || name.size() > kMaxName || shown(name) != name) {
    throw_error(
        make_error(ErrorKind::kInvalidArgument,
                   cat("'", shown(name), "' is not a name for an object: printable, at most ",
                       kMaxName, " characters")));
  }
  if (object == nullptr) {
    throw_error(make_error(ErrorKind::kInvalidArgument, cat("the object '", name, "' is null")));
  }
  const StatusOr<std::string> class_name = class_name_of(type);
  if (!class_name.ok()) {
    throw_error(make_error(ErrorKind::kNotFound,
                           cat("the object '", name, "' is of type ", c10::demangle(type_name),
                               ", which is not registered: call class_<T>(...) first")));
  }
  if (instances_.count(name) != 0) taken("the object", name);
  instances_.emplace(std::string(name), Instance{*class_name, std::move(object),
                                                 options.concurrent || is_concurrent(type)});
}

Library& Library::merge(const Library& other) {
  Library both = *this;
  if (both.name_.empty()) both.name_ = other.name_;
  for (const auto& [name, entry] : other.classes_) both.add_class(name, entry.type, entry.options);
  for (const auto& [name, entries] : other.methods_) {
    auto [at, fresh] = both.methods_.try_emplace(name, entries);
    // Operators of LibTorch may be in both.
    if (!fresh && name.rfind("aten::", 0) != 0) taken("the function", name);
  }
  both.pointers_.insert(other.pointers_.begin(), other.pointers_.end());
  for (const auto& [name, instance] : other.instances_) {
    if (!both.instances_.emplace(name, instance).second) taken("the object", name);
  }
  *this = std::move(both);
  return *this;
}

Library& Library::aten() { return aten(default_aten_operators()); }

Library& Library::aten(const std::vector<std::string>& names) {
  Library both = *this;
  for (const std::string& name : names) {
    if (both.methods_.count(name) != 0) continue;
    StatusOr<std::vector<internal::MethodEntry>> entries = internal::aten_entries(name);
    throw_if_error(entries.status());
    for (internal::MethodEntry& entry : *entries) both.add(std::move(entry), true);
  }
  *this = std::move(both);
  return *this;
}

std::vector<const Method*> Library::methods() const {
  std::vector<const Method*> all;
  for (const auto& [name, entries] : methods_) {
    for (const EntryRef& entry : entries) all.push_back(&entry->method);
  }
  return all;
}

std::vector<std::string> Library::method_names() const {
  std::vector<std::string> names;
  for (const auto& [name, entries] : methods_) names.push_back(name);
  return names;
}

Status Library::unknown(std::string_view name) const {
  return make_error(ErrorKind::kNotFound, cat("no function '", shown(name), "' is registered",
                                              suggestion(methods_, name)));
}

const Method* Library::find(std::string_view name) const {
  const auto it = methods_.find(name);
  return it == methods_.end() || it->second.empty() ? nullptr : &it->second.front()->method;
}

const Instance* Library::find_instance(std::string_view object) const {
  const auto it = instances_.find(object);
  return it == instances_.end() ? nullptr : &it->second;
}

std::vector<const Method*> Library::find_all(std::string_view name) const {
  std::vector<const Method*> found;
  const auto it = methods_.find(name);
  if (it == methods_.end()) return found;
  for (const EntryRef& entry : it->second) found.push_back(&entry->method);
  return found;
}

StatusOr<const Method*> Library::find(std::string_view name, uint64_t hash) const {
  const auto it = methods_.find(name);
  if (it == methods_.end()) return unknown(name);
  std::string registered;
  for (const EntryRef& entry : it->second) {
    if (entry->signature_hash == hash) return &entry->method;
    if (!registered.empty()) registered.append(" or ");
    registered.append(entry->method.signature);
  }
  return make_error(ErrorKind::kSignature,
                    cat("'", shown(name), "' is registered as ", registered));
}

StatusOr<const Instance*> Library::find_instance(std::string_view object,
                                                 const Method& method) const {
  if (object.empty()) {
    if (method.class_name.empty()) return static_cast<const Instance*>(nullptr);
    return make_error(ErrorKind::kSignature,
                      cat("'", method.name, "' is a method: call it on an object"));
  }
  if (method.class_name.empty()) {
    return make_error(ErrorKind::kSignature, cat("'", method.name,
                                                 "' is not a method, it cannot be "
                                                 "called on the object '",
                                                 shown(object), "'"));
  }
  const auto it = instances_.find(object);
  if (it == instances_.end()) {
    return make_error(ErrorKind::kNotFound, cat("no object '", shown(object), "' is registered",
                                                suggestion(instances_, object)));
  }
  if (it->second.class_name != method.class_name) {
    return make_error(ErrorKind::kSignature,
                      cat("the object '", shown(object), "' is of class '", it->second.class_name,
                          "', '", method.name, "' is a method of '", method.class_name, "'"));
  }
  return &it->second;
}

StatusOr<std::string> Library::name_of(const internal::PointerKey& pointer, std::type_index type,
                                       std::string_view signature) const {
  std::string found;
  std::string names;
  const auto [begin, end] = pointers_.equal_range(pointer);
  for (auto it = begin; it != end; ++it) {
    if (type != typeid(void) && it->second.type != type) continue;
    if (!names.empty()) names.append(", ");
    names.append("'").append(it->second.name).append("'");
    if (!found.empty()) {
      return make_error(
          ErrorKind::kInvalidArgument,
          cat("the function", symbol_of(pointer), " given by pointer, ", signature,
              ", is registered as ", names, ": name the one that is meant with FunctionRef"));
    }
    found = it->second.name;
  }
  if (found.empty()) {
    return make_error(ErrorKind::kNotFound,
                      cat("the function", symbol_of(pointer), " given by pointer, ", signature,
                          ", is not registered in "
                          "this worker's library",
                          name_.empty() ? std::string() : cat(" '", name_, "'"),
                          "; register it there too, or name it with FunctionRef"));
  }
  return found;
}

StatusOr<std::string> Library::class_name_of(std::type_index type) const {
  for (const auto& [name, entry] : classes_) {
    if (entry.type == type) return name;
  }
  return make_error(ErrorKind::kNotFound, cat("the class ", c10::demangle(type.name()),
                                              " is not registered in this worker's library"));
}

bool Library::is_concurrent(std::type_index type) const {
  for (const auto& [name, entry] : classes_) {
    if (entry.type == type) return entry.options.concurrent;
  }
  return false;
}

const internal::Invoker* Library::invoker_of(const Method& method) const {
  const auto it = methods_.find(method.name);
  if (it == methods_.end()) return nullptr;
  for (const EntryRef& entry : it->second) {
    if (&entry->method == &method) return &entry->invoker;
  }
  return nullptr;
}

}  // namespace weft
