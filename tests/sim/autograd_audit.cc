#include "weft/tests/sim/autograd_audit.h"

#include <optional>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "weft/dist_autograd/internal/wire.h"
#include "weft/rpc/containers.h"

namespace weft::testing {
namespace {

using internal::NodePtr;
using internal::PassId;
using internal::RecvRpcBackward;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;

constexpr const char kPrefix[] = "@dist_autograd.";

int number_of(const WorkerInfo& info) { return info.name.back() - '0'; }

Status wrong(const std::string& what) { return make_error(ErrorKind::kInternal, what); }

std::string text(const MessageKey& key) {
  return absl::StrCat("message ", key.second, " of w", key.first);
}

// Visits what is behind `edge` at one worker; what it has not seen yet: recvs with the input.
void walk(const Edge& edge, std::set<const internal::Node*>* seen,
          const std::function<void(const RecvRpcBackward&, uint32_t)>& found) {
  std::vector<Edge> left{edge};
  while (!left.empty()) {
    const Edge one = std::move(left.back());
    left.pop_back();
    if (!one.is_valid()) continue;
    if (const auto* recv = dynamic_cast<const RecvRpcBackward*>(one.function.get())) {
      found(*recv, one.input_nr);
    } else if (seen->insert(one.function.get()).second) {
      for (const Edge& next : one.function->next_edges()) left.push_back(next);
    }
  }
}

}  // namespace

// ---- what should happen ------------------------------------------------------------------------

Recorded::Recorded(const std::vector<Worker>& workers, const AutogradContextId& context)
    : sends(workers.size()) {
  for (size_t w = 0; w < workers.size(); ++w) {
    numbers[key_of(workers[w].info())] = static_cast<int>(w);
    const auto service = workers[w].service<internal::DistAutogradService>();
    if (const auto state = service->find(context)) sends[w] = state->sends();
  }
}

LiveSet::LiveSet(const Recorded& recorded, int root, const edge_list& losses) {
  participants.insert(root);
  std::set<const internal::Node*> seen;
  std::vector<std::pair<int, Edge>> left;
  for (const Edge& loss : losses) left.emplace_back(root, loss);
  while (!left.empty()) {
    const auto [at, edge] = std::move(left.back());
    left.pop_back();
    walk(edge, &seen, [&, at = at](const RecvRpcBackward& recv, uint32_t input) {
      const int origin = recorded.numbers.at(recv.origin);
      Message& message = messages[{origin, recv.message}];
      message.receiver = at;
      participants.insert(origin);
      if (!message.outputs.insert(input).second) return;
      const auto send = recorded.sends[static_cast<size_t>(origin)].find(recv.message);
      if (send == recorded.sends[static_cast<size_t>(origin)].end()) return;
      left.emplace_back(origin, send->second->next_edge(input));
    });
  }
}

bool LiveSet::all_live(const Recorded& recorded, int worker) const {
  for (const auto& [number, send] : recorded.sends[static_cast<size_t>(worker)]) {
    const auto at = messages.find({worker, number});
    if (at == messages.end() || at->second.outputs.size() != send->num_inputs()) return false;
  }
  return true;
}

// ---- runs --------------------------------------------------------------------------------------

class RunCounter::Hook final : public torch::autograd::FunctionPreHook {
 public:
  Hook(std::shared_ptr<State> state, const internal::Node* node, int worker, const MessageKey& key)
      : state_(std::move(state)), node_(node), worker_(worker), key_(key) {}
  variable_list operator()(const variable_list& gradients) override {
    ++state_->runs;
    const bool is_send = dynamic_cast<const internal::SendRpcBackward*>(node_) != nullptr;
    ++(is_send ? state_->sends : state_->recvs)[key_];
    state_->before(worker_, node_);
    return gradients;
  }

 private:
  const std::shared_ptr<State> state_;
  const internal::Node* const node_;
  const int worker_;
  const MessageKey key_;
};

void RunCounter::watch(const Recorded& recorded, const std::vector<std::pair<int, Edge>>& losses) {
  std::vector<std::pair<int, Edge>> from = losses;
  for (size_t w = 0; w < recorded.sends.size(); ++w) {
    const int worker = static_cast<int>(w);
    for (const auto& [number, send] : recorded.sends[w]) {
      send->add_pre_hook(
          std::make_unique<Hook>(state_, send.get(), worker, MessageKey{worker, number}));
      for (const Edge& edge : send->next_edges()) from.emplace_back(worker, edge);
    }
  }
  std::set<const internal::Node*> seen;
  for (const auto& [worker, edge] : from) {
    walk(edge, &seen, [&, at = worker](const RecvRpcBackward& recv, uint32_t) {
      if (!seen.insert(&recv).second) return;
      const MessageKey key{recorded.numbers.at(recv.origin), recv.message};
      const_cast<RecvRpcBackward&>(recv).add_pre_hook(
          std::make_unique<Hook>(state_, &recv, at, key));
    });
  }
}

Status RunCounter::check(const std::vector<const LiveSet*>& must,
                         const std::vector<const LiveSet*>& may) const {
  const auto times = [](const std::vector<const LiveSet*>& passes, const MessageKey& key) {
    int64_t n = 0;
    for (const LiveSet* live : passes) n += static_cast<int64_t>(live->messages.count(key));
    return n;
  };
  std::set<MessageKey> all;
  for (const LiveSet* live : may) {
    for (const auto& [key, message] : live->messages) all.insert(key);
  }
  for (const auto& [key, n] : state_->sends) all.insert(key);
  for (const auto& [key, n] : state_->recvs) all.insert(key);
  for (const MessageKey& key : all) {
    for (const auto* runs : {&state_->sends, &state_->recvs}) {
      const auto at = runs->find(key);
      const int64_t n = at == runs->end() ? 0 : at->second;
      if (n >= times(must, key) && n <= times(may, key)) continue;
      return wrong(absl::StrCat("LIVE-2: the ", runs == &state_->sends ? "send" : "recv", " of ",
                                text(key), " ran ", n, " times, it is live in ", times(must, key),
                                " to ", times(may, key), " passes"));
    }
  }
  return absl::OkStatus();
}

// ---- messages ----------------------------------------------------------------------------------

class Audit::Tap final : public Service,
                         public Interceptor,
                         public std::enable_shared_from_this<Audit::Tap> {
 public:
  Tap(int worker, std::shared_ptr<std::vector<Sent>> sent, std::shared_ptr<Trigger> trigger)
      : worker_(worker), sent_(std::move(sent)), trigger_(std::move(trigger)) {}

  std::vector<Method> methods() override { return {}; }
  std::shared_ptr<Interceptor> interceptor() override { return shared_from_this(); }
  std::string_view key() const override { return "@audit"; }
  bool concerns(const UntypedCall& call) const override {
    return absl::StartsWith(call.method, kPrefix) && call.method != internal::kReleaseMethod;
  }

  StatusOr<AttachmentPtr> attach(const WorkerInfo& to, const UntypedCall& call) override {
    Sent sent;
    sent.kind = call.method.substr(sizeof kPrefix - 1);
    sent.from = worker_;
    sent.to = number_of(to);
    if (call.method == internal::kAdvanceMethod) {
      internal::AdvanceData data = value_or_throw(internal::unpack_advance(call.arguments));
      sent.pass = data.pass;
      sent.named = std::move(data.advance.named);
      for (const auto& one : data.advance.gradients) sent.gradients.push_back(one.message);
      sent.done = data.advance.done;
      sent.answers = data.advance.answer.has_value();
    } else {
      Decoder in(call.arguments);
      sent.pass = value_or_throw(internal::decode_notice(value_or_throw(in.take_bytes()))).pass;
    }
    sent_->push_back(std::move(sent));
    return AttachmentPtr(new Attached(sent_, sent_->size() - 1));
  }

  void arrive(IncomingRequest& request, std::string_view metadata, Proceed proceed) override {
    const size_t index = std::stoul(std::string(metadata));
    calls_[call_of(request)] = index;
    ++sent_->at(index).arrivals;
    if (trigger_->left > 0 && --trigger_->left == 0) trigger_->fn();
    proceed(absl::OkStatus());
  }

  StatusOr<AttachmentPtr> attach_answer(IncomingRequest& request, const Payload& result) override {
    const auto at = calls_.find(call_of(request));
    if (at == calls_.end()) return AttachmentPtr();  // no message of a pass
    Sent& one = sent_->at(at->second);
    if (one.kind == "advance") {
      one.said =
          value_or_throw(internal::decode_advanced(value_or_throw(Decoder(result).take_bytes())));
    }
    return AttachmentPtr();
  }

 private:
  using Call = std::pair<uint64_t, uint64_t>;
  static Call call_of(IncomingRequest& request) {
    return {request.context().caller().incarnation, request.context().call_id()};
  }
  class Attached final : public Attachment {
   public:
    Attached(std::shared_ptr<std::vector<Sent>> sent, size_t index)
        : Attachment(absl::StrCat(index)), sent_(std::move(sent)), index_(index) {}
    void ended(Delivery, const Status& result) override {
      Sent& one = sent_->at(index_);
      ++one.ended;
      one.answer = result;
    }

   private:
    const std::shared_ptr<std::vector<Sent>> sent_;
    const size_t index_;
  };

  const int worker_;
  const std::shared_ptr<std::vector<Sent>> sent_;
  const std::shared_ptr<Trigger> trigger_;
  std::map<Call, size_t> calls_{};
};

ServiceFactory Audit::service(int worker) {
  return [worker, sent = sent_, trigger = trigger_](const ServiceContext&) {
    return std::make_shared<Tap>(worker, sent, trigger);
  };
}

void Audit::on_arrival(int64_t n, std::function<void()> fn) {
  trigger_->left = n;
  trigger_->fn = std::move(fn);
}

std::set<PassId> Audit::passes() const {
  std::set<PassId> out;
  for (const Sent& one : *sent_) out.insert(one.pass);
  return out;
}

Status Audit::check(const PassId& pass, const Recorded& recorded, const LiveSet& live, int root,
                    bool slow) const {
  std::map<MessageKey, std::map<uint32_t, int64_t>> named;
  std::map<MessageKey, int64_t> gradients;
  std::map<int, int64_t> dones;
  std::map<int, int64_t> closes;
  std::set<int> asked;
  std::map<int, int64_t> answers;  // carried, less those that came
  for (const Sent& one : *sent_) {
    if (one.pass != pass) continue;
    const std::string what = absl::StrCat("a ", one.kind, " from w", one.from, " to w", one.to,
                                          " of pass ", pass.counter, " of w", root);
    if (!live.participants.contains(one.to)) return wrong(absl::StrCat("LIVE-8: ", what));
    if (one.from == one.to) return wrong(absl::StrCat("LIVE-6: ", what, ", to itself"));
    if (one.kind == "advance") {
      // Replies of the root, and those that went with another message, may be under way still.
      const bool later = one.to == root || (one.said.has_value() && one.said->carried);
      if (!one.named.empty() &&
          (one.arrivals != 1 || one.ended > 1 || !one.answer.ok() || (one.ended == 0 && !later))) {
        return wrong(absl::StrCat("LIVE-6: ", what, " came ", one.arrivals, " times, ", one.ended,
                                  " replies, ", one.answer.ToString()));
      }
      for (const auto& [message, outputs] : one.named) {
        const auto at = live.messages.find({one.to, message});
        if (at == live.messages.end() || at->second.receiver != one.from) {
          return wrong(absl::StrCat("LIVE-6: ", what, " names dead ", text({one.to, message})));
        }
        for (const uint32_t output : outputs) ++named[at->first][output];
      }
      for (const uint64_t message : one.gradients) {
        const MessageKey key{one.to, message};
        const auto at = live.messages.find(key);
        if (at == live.messages.end() || at->second.receiver != one.from || ++gradients[key] > 1) {
          return wrong(absl::StrCat("LIVE-6: ", what, " for ", text(key), ", dead or once more"));
        }
      }
      if (one.done) ++dones[one.from];
      if (one.answers) --answers[one.from];
      if ((one.done || one.answers) && one.to != root) return wrong(absl::StrCat("LIVE-6: ", what));
      if (!one.said.has_value()) continue;
      if (one.said->done) ++dones[one.to];
      if (one.said->carried) ++answers[one.to];
      if ((one.said->done || one.said->carried) && one.from != root) {
        return wrong(absl::StrCat("LIVE-6: ", what, ", answered as to the root"));
      }
    } else if (one.kind == "done") {
      // In a slow schedule the next pass may last beyond the deadline of this one, after which a worker asks the root
      // once how it has ended, by saying again that it is done.
      const bool asks = slow && dones[one.from] == 1 && !asked.contains(one.from);
      if (asks) asked.insert(one.from);
      if (one.to != root || (!asks && ++dones[one.from] > 1)) {
        return wrong(absl::StrCat("LIVE-6: ", what));
      }
    } else if (one.kind == "close") {
      if (one.from != root) return wrong(absl::StrCat("LIVE-6: ", what, ", which is not the root"));
      if (++closes[one.to] > 1) return wrong(absl::StrCat("LIVE-6: ", what, ", once more"));
      if (live.all_live(recorded, one.to)) {
        return wrong(absl::StrCat("LIVE-6: ", what, ", all of whose outputs are live"));
      }
    } else if (one.kind != "abort" || one.to != root || !slow) {
      return wrong(absl::StrCat("LIVE-6: ", what, ", which has succeeded"));
    }
  }
  for (const auto& [key, message] : live.messages) {
    if (message.receiver == key.first) continue;
    if (gradients[key] != 1) return wrong(absl::StrCat("LIVE-6: no gradient for ", text(key)));
    for (const uint32_t output : message.outputs) {
      if (named[key][output] == 1) continue;
      return wrong(absl::StrCat("LIVE-6: output ", output, " of ", text(key), " was named ",
                                named[key][output], " times"));
    }
    if (named[key].size() != message.outputs.size()) {
      return wrong(absl::StrCat("LIVE-6: dead outputs of ", text(key), " were named"));
    }
  }
  for (const int worker : live.participants) {
    if (worker == root) continue;
    if (dones[worker] != 1) return wrong(absl::StrCat("LIVE-6: no done from w", worker));
    if (answers[worker] != 0) return wrong(absl::StrCat("LIVE-6: answers of w", worker));
    if (closes[worker] != (live.all_live(recorded, worker) ? 0 : 1)) {
      return wrong(absl::StrCat("LIVE-6: no close to w", worker));
    }
  }
  return absl::OkStatus();
}

bool Audit::may_be_final(const PassId& pass, const Recorded& recorded, int root,
                         const edge_list& losses, int worker, const internal::Node* node) const {
  bool wave_over = true;
  bool closed = false;
  std::map<int, int64_t> carried;  // answers that have not come yet
  std::map<uint64_t, std::set<uint32_t>> named;
  const auto& sends = recorded.sends[static_cast<size_t>(worker)];
  std::set<const internal::Node*> seen;
  std::vector<Edge> left;
  const auto name = [&](uint64_t message, uint32_t output) {
    const auto send = sends.find(message);
    if (!named[message].insert(output).second || send == sends.end()) return;
    left.push_back(send->second->next_edge(output));
  };
  if (worker == root) left.insert(left.end(), losses.begin(), losses.end());
  for (const Sent& one : *sent_) {
    if (one.pass != pass) continue;
    const bool elsewhere = one.said.has_value() && one.said->carried;
    // The root answers at once, others when all below have, or by a message of their own.
    wave_over &= one.named.empty() || elsewhere || (one.to == root ? one.arrivals : one.ended) > 0;
    if (elsewhere) ++carried[one.to];
    if (one.answers && one.arrivals > 0) --carried[one.from];
    closed |= one.kind == "close" && one.to == worker && one.arrivals > 0;
    if (one.to != worker || one.arrivals == 0) continue;
    for (const auto& [message, outputs] : one.named) {
      for (const uint32_t output : outputs) name(message, output);
    }
  }
  for (const auto& [from, n] : carried) wave_over &= n <= 0;
  if ((worker == root || closed) && wave_over) return true;
  while (!left.empty()) {
    const Edge edge = std::move(left.back());
    left.pop_back();
    walk(edge, &seen, [&](const RecvRpcBackward& recv, uint32_t input) {
      if (recorded.numbers.at(recv.origin) == worker) name(recv.message, input);
    });
  }
  std::set<const internal::Node*> open;  // what may still be reached
  for (const auto& [number, send] : sends) {
    for (uint32_t i = 0; i < send->num_inputs(); ++i) {
      if (named[number].contains(i)) continue;
      open.insert(send.get());
      walk(send->next_edge(i), &open,
           [&](const RecvRpcBackward& recv, uint32_t) { open.insert(&recv); });
    }
  }
  return !open.contains(node);
}

}  // namespace weft::testing
