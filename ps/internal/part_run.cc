// Runs: small pushes that came as one request. Those of different keys are applied as one, where that comes to the same;
// everything else is done push by push.

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "weft/ps/internal/part.h"

namespace weft::ps::internal {
namespace {

PushHeader header_of(const BatchedRequest& run, size_t place) {
  PushHeader header = *run.request.push;
  header.number = run.run[place].number;
  header.floor = run.run[place].floor;
  return header;
}

std::vector<at::Tensor> rows_of_run(const BatchedRequest& run, int64_t key, int64_t keys) {
  return {run.tensors[0].narrow(0, key, keys), run.tensors[1].narrow(0, key, keys)};
}

}  // namespace

void Part::handle_run(const WorkerKey& caller, const PartCall& run, const ScopeRef& scope) {
  // As in call(): the pushes behind one that throws are told.
  const auto guarded = [this](const auto& handle_some) {
    try {
      return handle_some();
    } catch (...) {
      fail_all(annotate(status_from_current_exception(), "the part has failed"));
      return true;
    }
  };
  const std::vector<RunPush>& pushes = run.what.run;
  int64_t key = 0;
  for (size_t place = 0; place < pushes.size();) {
    const size_t end = joinable(run.what, place, key);
    const bool done =
        end > place + 1 && guarded([&] { return handle_joined(caller, run, place, end, key); });
    for (; place < end; ++place) {
      if (!done) {
        guarded([&] {
          handle_alone(caller, run, place, key, scope);
          return true;
        });
      }
      key += pushes[place].keys;
    }
  }
}

void Part::handle_alone(const WorkerKey& caller, const PartCall& run, size_t place, int64_t key,
                        const ScopeRef& scope) {
  Request request = run.what.request;
  request.push = header_of(run.what, place);
  handle(caller, request, rows_of_run(run.what, key, run.what.run[place].keys), scope,
         [reply = run.reply, place](StatusOr<Reply> said) { reply(place, {std::move(said)}); });
}

// The log of a table with two copies has each push by itself, and so does the data of its backup.
size_t Part::joinable(const BatchedRequest& run, size_t first, int64_t key) const {
  const Mode mode = identity_.definition.consistency.mode;
  const bool joins = !replica_.has_value() && closed_.ok() && data_->joins() &&
                     run.request.push->kind == PushKind::kGradient &&
                     (mode == Mode::kAsp || mode == Mode::kSsp);
  if (!joins) return first + 1;
  const int64_t* keys = run.tensors[0].const_data_ptr<int64_t>() + key;
  absl::flat_hash_set<int64_t> seen;
  size_t end = first;
  for (; end < run.run.size(); ++end) {
    const RunPush& push = run.run[end];
    // A floor above the first of them would have its outcome forgotten before it is noted.
    if (push.floor > run.run[first].number) break;
    bool fresh = true;
    for (uint32_t i = 0; fresh && i < push.keys; ++i) fresh = seen.insert(*keys++).second;
    if (!fresh) break;
  }
  return std::max(end, first + 1);
}

// False: nothing was done that handle_alone() would not do.
bool Part::handle_joined(const WorkerKey& caller, const PartCall& run, size_t first, size_t end,
                         int64_t key) {
  const ClientKey client{caller, run.what.request.client};
  PushHeader header = header_of(run.what, first);
  if (header.version > protocol_.version()) return false;
  int64_t keys = 0;
  for (size_t i = first; i < end; ++i) {
    const auto judged = protocol_.judge(client, header_of(run.what, i));
    if (judged.verdict != PartProtocol::Verdict::kApply) return false;
    keys += run.what.run[i].keys;
  }
  StatusOr<Push> push = data_->accept(header, rows_of_run(run.what, key, keys));
  if (!push.ok()) return false;
  const PartProtocol::Judgement applies{PartProtocol::Verdict::kApply};
  Answer said;
  said.version = protocol_.version() + 1;
  said.clock = protocol_.clock_of(client);
  said.behind = protocol_.version() - header.version;
  for (size_t i = first; i < end; ++i) {
    metrics_.behind->observe(static_cast<double>(protocol_.version() - header.version));
    const uint64_t token = ++last_token_;
    runtime_->trace("ps.accept", identity_.id, token);
    PartEffects effects;  // that it is to be applied now, with the others
    protocol_.commit(client, header_of(run.what, i), applies, absl::OkStatus(), token, &effects);
  }
  const auto count = static_cast<uint32_t>(end - first);
  metrics_.pushes->add(count);
  hot_keys_.note(push->keys);
  std::vector<Push> one;
  one.push_back(*std::move(push));
  data_->apply(std::move(one), 1);
  answer(
      [reply = run.reply, first, count](StatusOr<Reply> told) {
        reply(first, {std::move(told), count - 1});
      },
      Reply{said, {}});
  return true;
}

}  // namespace weft::ps::internal
