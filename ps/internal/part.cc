#include "weft/ps/internal/part.h"

#include <algorithm>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"

namespace weft::ps::internal {
namespace {
const HistogramOptions kSteps{.first = 1, .factor = 2, .buckets = 12};
}

PartMetrics::PartMetrics(std::shared_ptr<Metrics> metrics, const std::string& table)
    : keep(std::move(metrics)) {
  Metrics& m = *keep;
  const MetricLabels labels = {{"table", table}};
  pushes = m.counter("weft_ps_pushes_total", "Pushes that were accepted", labels);
  copies =
      m.counter("weft_ps_copies_total", "Pushes that came again, and were not done again", labels);
  dropped =
      m.counter("weft_ps_dropped_total", "Pushes that came after their step had ended", labels);
  refused = m.counter("weft_ps_refused_total", "Pushes that were refused with an error", labels);
  pulls = m.counter("weft_ps_pulls_total", "Pulls that were answered", labels);
  waiting = m.gauge("weft_ps_waiting_pulls", "Pulls that wait for clients that are behind", labels);
  held_bytes = m.gauge("weft_ps_held_bytes", "Pushes that wait for their step to end", labels);
  evicted =
      m.counter("weft_ps_evicted_total", "Rows that made room, or were not used in time", labels);
  not_admitted = m.counter("weft_ps_not_admitted_total",
                           "Rows of gradients for keys that had no row yet", labels);
  rows = m.gauge("weft_ps_rows", "Rows, or elements of a dense table", labels);
  bytes = m.gauge("weft_ps_table_bytes", "Values and the rule's state", labels);
  clients = m.gauge("weft_ps_clients", "Clients that take part", labels);
  lag = m.histogram("weft_ps_lag_steps", "Steps by which the slowest client is behind a pull",
                    kSteps, labels);
  behind = m.histogram("weft_ps_behind_updates",
                       "Updates between the values of a push and the push", kSteps, labels);
  takeovers = m.counter("weft_ps_takeovers_total", "Backups that became owners here", labels);
  images = m.counter("weft_ps_images_total", "Copies of a part that were begun anew", labels);
  log_bytes = m.gauge("weft_ps_log_bytes", "What backups have not confirmed", labels);
}

Part::Part(PartIdentity identity, std::unique_ptr<PartData> data,
           std::shared_ptr<ServerLimits> limits, std::shared_ptr<Metrics> metrics,
           std::shared_ptr<Runtime> runtime)
    : identity_(std::move(identity)),
      limits_(std::move(limits)),
      metrics_(std::move(metrics), identity_.table),
      runtime_(std::move(runtime)),
      protocol_(identity_.definition.consistency),
      data_(std::move(data)) {
  publish();
}

Part::~Part() {
  for (auto& [token, waiting] : waiting_) {
    waiting.reply(make_error(ErrorKind::kState, absl::StrCat(label(), " is gone")));
  }
  for (Gated& gated : gated_) {
    gated.reply(make_error(ErrorKind::kState, absl::StrCat(label(), " is gone")));
  }
  end_cut(make_error(ErrorKind::kState, absl::StrCat(label(), " is gone")));
  metrics_.log_bytes->add(-seen_log_bytes_);
  show({});
}

std::string Part::label() const {
  return absl::StrCat("table '", identity_.table, "', part ", identity_.index, " at '",
                      identity_.self.name, "'");
}

void Part::take_turn(Task task) {
  const auto keep = shared_from_this();
  {
    MutexLock lock(&mutex_);
    turns_.push_back(std::move(task));
    if (busy_) return;
    busy_ = true;
  }
  const at::AutoGradMode no_grad(false);
  for (;;) {
    Task next;
    {
      MutexLock lock(&mutex_);
      if (turns_.empty()) {
        busy_ = false;
        return;
      }
      next = std::move(turns_.front());
      turns_.pop_front();
    }
    try {
      next();
    } catch (...) {
      // Of LibTorch, for want of memory: an update may have been done in part, so nothing is said
      // of these values any more. Requests that wait are told; a request that was under way is,
      // too, because its reply is dropped.
      fail_all(annotate(status_from_current_exception(), "the part has failed"));
      publish();
    }
  }
}

void Part::fail_all(const Status& why) {
  if (closed_.ok()) closed_ = why;
  for (auto& [token, waiting] : waiting_) {
    protocol_.cancel_pull(token);
    answer(std::move(waiting.reply), annotate(closed_, label()));
  }
  waiting_.clear();
  for (auto& [token, push] : pushes_) limits_->queued.fetch_sub(push.bytes());
  pushes_.clear();
  end_cut(annotate(closed_, label()));
  if (replica_.has_value()) let_go();
}

void Part::call(const WorkerKey& caller, std::vector<PartCall> calls, ScopeRef scope) {
  take_turn([this, caller, calls = std::move(calls), scope = std::move(scope)]() mutable {
    for (PartCall& one : calls) {
      try {
        if (!one.what.run.empty()) {
          handle_run(caller, one, scope);
          continue;
        }
        handle(
            caller, one.what.request, std::move(one.what.tensors), scope,
            [reply = std::move(one.reply)](StatusOr<Reply> said) { reply(0, {std::move(said)}); });
      } catch (...) {  // as in take_turn(); those behind it are told
        fail_all(annotate(status_from_current_exception(), "the part has failed"));
      }
    }
    publish();
  });
}

std::vector<PartProtocol::ClientView> Part::client_views() {
  take_turn([this] {
    std::vector<PartProtocol::ClientView> now = protocol_.client_views();
    MutexLock lock(&mutex_);
    views_ = std::move(now);
  });
  MutexLock lock(&mutex_);
  return views_;
}

void Part::worker_gone(const WorkerKey& worker) {
  take_turn([this, worker] {
    if (!owns()) return;  // a backup hears of it from its owner, and of the rest when it serves
    if (!takes_requests()) return gone_later_.push_back(worker);
    note_gone(worker);
    publish();
  });
}

void Part::note_gone(const WorkerKey& worker) {
  PartEffects effects;
  protocol_.worker_gone(worker, &effects);
  perform(std::move(effects));
  if (replica_.has_value()) append({.gone = worker});
}

void Part::close(const Status& why) {
  take_turn([this, why] {
    fail_all(why);
    publish();
  });
}

PartReport Part::report() const {
  MutexLock lock(&mutex_);
  return report_;
}

void Part::publish() {
  settle_cut();
  go_on_moving();
  if (takes_requests() && closed_.ok()) {
    for (const WorkerKey& worker : std::exchange(gone_later_, {})) note_gone(worker);
  }
  PartReport now{protocol_.version(),    protocol_.clients(), protocol_.held(), protocol_.parked(),
                 protocol_.remembered(), data_->rows(),       data_->bytes()};
  if (replica_.has_value()) {
    now.role = replica_->role();
    now.map = replica_->map();
    now.position = replica_->last();
    now.confirmed = replica_->confirmed();
    now.formed = formed_;
    now.joins = !owns() && replica_->map().backup != identity_.self;
    const int64_t log_bytes = stream_->bytes + next_stream_->bytes;
    metrics_.log_bytes->add(log_bytes - std::exchange(seen_log_bytes_, log_bytes));
  }
  show(now);
  const bool gate = replica_.has_value() && owns() && closed_.ok();
  for (auto& [to, what] : std::exchange(answers_, {})) {
    if (gate && replica_->last() > replica_->released()) {
      gated_.push_back({replica_->last(), std::move(to), std::move(what)});
    } else {
      to(std::move(what));
    }
  }
  if (!gate) return;
  while (!gated_.empty() && gated_.front().position <= replica_->released()) {
    Gated leaves = std::move(gated_.front());
    gated_.pop_front();
    leaves.reply(std::move(leaves.what));
  }
  pump();
}

// A worker may have several parts of one table: each adds what is its own.
void Part::show(const PartReport& now) {
  MutexLock lock(&mutex_);
  metrics_.waiting->add(static_cast<int64_t>(now.parked - report_.parked));
  metrics_.rows->add(now.rows - report_.rows);
  metrics_.bytes->add(now.bytes - report_.bytes);
  metrics_.clients->add(static_cast<int64_t>(now.clients - report_.clients));
  report_ = now;
}

void Part::answer(PartReply reply, StatusOr<Reply> what) {
  answers_.emplace_back(std::move(reply), std::move(what));
}

Status Part::execute(const ClientKey& client, const Request& request,
                     std::vector<at::Tensor> tensors, const Status* said, Answer* answer,
                     Judged* outcome, PartEffects* effects) {
  if (request.enter.has_value()) {
    WEFT_RETURN_IF_ERROR(protocol_.enter(client, *request.enter, effects).status());
  }
  if (request.push.has_value()) {
    WEFT_RETURN_IF_ERROR(
        handle_push(client, *request.push, std::move(tensors), said, answer, outcome, effects));
  }
  if (request.advance.has_value()) {
    WEFT_RETURN_IF_ERROR(protocol_.advance(client, *request.advance, effects));
  }
  if (request.leave) protocol_.leave(client, effects);
  return absl::OkStatus();
}

void Part::handle(const WorkerKey& caller, const Request& request, std::vector<at::Tensor> tensors,
                  const ScopeRef& scope, PartReply reply) {
  if (replica_.has_value() && (!takes_requests() || !closed_.ok())) return reply(moved());
  if (!closed_.ok()) return answer(std::move(reply), annotate(closed_, label()));
  const ClientKey client{caller, request.client};
  if (keeps_out(client, request)) {
    return answer(std::move(reply),
                  make_error(ErrorKind::kUnavailable,
                             absl::StrCat(label(), ": a snapshot is being cut; enter again")));
  }
  if (Status s = check_restored(client, request); !s.ok()) {
    return answer(std::move(reply), std::move(s));
  }
  const size_t pushed = request.push.has_value() ? data_->push_tensors() : 0;
  const size_t asked = request.pull.has_value() ? data_->pull_tensors() : 0;
  if (tensors.size() != pushed + asked) {
    return answer(std::move(reply),
                  make_error(ErrorKind::kProtocol,
                             absl::StrCat(label(), ": ", tensors.size(),
                                          " tensors, and the request wants ", pushed + asked)));
  }
  std::vector<at::Tensor> keys(tensors.begin() + static_cast<int64_t>(pushed), tensors.end());
  tensors.resize(pushed);
  PartEffects effects;
  Answer said;
  std::optional<LogEntry> entry;
  Judged outcome;
  if (replica_.has_value()) {
    outcome.accepted = make_error(ErrorKind::kState, "not judged");
    entry = LogEntry{caller, request};
    entry->request->pull.reset();
    entry->tensors = tensors;
    // As for a push that is kept: an answer that waits for no backup leaves before the log does.
    const bool early =
        (replica_->streams() && !replica_->map().ready) || replica_->streams_to_next();
    for (at::Tensor& t : entry->tensors) t = early ? t.clone() : t;
  }
  Status done = execute(client, request, std::move(tensors), nullptr, &said, &outcome, &effects);
  uint64_t token = 0;
  if (done.ok() && request.pull.has_value()) {
    token = ++last_token_;
    done = protocol_.pull(client, *request.pull, token, &effects);
  }
  said.clock = protocol_.clock_of(client);
  if (replica_.has_value() && replica_->map().epoch > request.epoch) said.map = replica_->map();
  const bool pulls = done.ok() && request.pull.has_value();
  if (pulls) {
    waiting_.emplace(token, Waiting{std::move(keys), said, std::move(reply)});
  }
  perform(std::move(effects));
  if (entry.has_value()) {
    if (!outcome.accepted.ok()) entry->tensors.clear();
    if (!outcome.instead.empty()) entry->tensors = std::move(outcome.instead);
    entry->accepted = outcome.accepted;
    entry->evicted = std::move(outcome.evicted);
    append(*std::move(entry));
  }
  if (!done.ok()) return answer(std::move(reply), annotate(done, label()));
  if (!pulls) {
    said.version = protocol_.version();
    return answer(std::move(reply), Reply{said, {}});
  }
  if (!waiting_.contains(token)) return;
  scope->cancel.on_cancel([weak = weak_from_this(), token] {
    if (const auto self = weak.lock()) {
      self->take_turn([part = self.get(), token] {
        part->cancel(token);
        part->publish();
      });
    }
  });
}

Status Part::handle_push(const ClientKey& client, const PushHeader& header,
                         std::vector<at::Tensor> tensors, const Status* said, Answer* answer,
                         Judged* outcome, PartEffects* effects) {
  using Verdict = PartProtocol::Verdict;
  const PartProtocol::Judgement judged = protocol_.judge(client, header);
  answer->dropped = judged.dropped;
  const bool owner = said == nullptr;
  switch (judged.verdict) {
    case Verdict::kRefused: return judged.told;
    case Verdict::kSame: metrics_.copies->add(owner ? 1 : 0); return judged.told;
    case Verdict::kDrop:
      metrics_.dropped->add(owner ? 1 : 0);
      protocol_.after_drop(effects);
      return absl::OkStatus();
    case Verdict::kApply:
    case Verdict::kHold: break;
  }
  std::vector<at::Tensor> given;
  if (judged.verdict == Verdict::kHold) given = tensors;
  StatusOr<Push> push =
      !owner && !said->ok() ? StatusOr<Push>(*said) : data_->accept(header, std::move(tensors));
  if (owner) {
    outcome->evicted = data_->take_evicted();
    metrics_.evicted->add(static_cast<int64_t>(outcome->evicted.size()));
  }
  if (push.ok() && judged.verdict == Verdict::kHold) {
    // The client may write into its tensor when it is told that the push is kept.
    const bool shared = std::any_of(given.begin(), given.end(), [&](const at::Tensor& t) {
      return t.defined() && t.is_alias_of(push->values);
    });
    if (shared) push->values = push->values.clone();
    if (push->then.defined()) push->then = push->then.clone();
  }
  if (owner && push.ok() && judged.verdict == Verdict::kHold &&
      limits_->queued.load() + push->bytes() > limits_->queue_bytes) {
    push = make_error(ErrorKind::kResource,
                      absl::StrCat("push of ", push->bytes(),
                                   " bytes to wait for its step, beside ", limits_->queued.load(),
                                   " that do, and queue_bytes is ", limits_->queue_bytes));
  }
  if (owner && push.ok() && !stream_->log.empty() && replica_->map().ready &&
      stream_->bytes + push->bytes() > limits_->log_bytes) {
    push = make_error(ErrorKind::kResource,
                      absl::StrCat("push of ", push->bytes(), " bytes beside ", stream_->bytes,
                                   " that its backup '", replica_->map().backup.name,
                                   "' has not confirmed, and log_bytes is ", limits_->log_bytes));
  }
  const uint64_t behind = protocol_.version() - std::min(protocol_.version(), header.version);
  const uint64_t token = ++last_token_;
  if (push.ok()) {
    metrics_.pushes->add(owner ? 1 : 0);
    if (owner) metrics_.behind->observe(static_cast<double>(behind));
    limits_->queued.fetch_add(push->bytes());
    metrics_.held_bytes->add(push->bytes());
    answer->behind = behind;
    hot_keys_.note(push->keys);
    if (push->not_admitted != 0) {
      metrics_.not_admitted->add(static_cast<int64_t>(push->not_admitted));
      if (replica_.has_value()) outcome->instead = data_->pack(*push);
    }
    runtime_->trace("ps.accept", identity_.id, token);
    pushes_.emplace(token, *std::move(push));
  } else {
    metrics_.refused->add(owner ? 1 : 0);
  }
  outcome->accepted = push.status();
  protocol_.commit(client, header, judged, push.status(), token, effects);
  return push.status();
}

void Part::perform(PartEffects effects) {
  for (const PartEffect& effect : effects) {
    if (const auto* step = std::get_if<ApplyStep>(&effect)) {
      apply(*step);
    } else {
      const PullReady& ready = std::get<PullReady>(effect);
      answer_pull(ready.token, ready.lag);
    }
  }
}

void Part::apply(const ApplyStep& step) {
  std::vector<Push> pushes;
  for (const uint64_t token : step.tokens) {
    auto at = pushes_.extract(token);
    limits_->queued.fetch_sub(at.mapped().bytes());
    metrics_.held_bytes->add(-at.mapped().bytes());
    pushes.push_back(std::move(at.mapped()));
  }
  data_->apply(std::move(pushes), step.divisor);
}

void Part::answer_pull(uint64_t token, uint64_t lag) {
  auto at = waiting_.extract(token);
  if (at.empty()) return;  // its request failed after all
  Waiting& waiting = at.mapped();
  metrics_.pulls->add();
  metrics_.lag->observe(static_cast<double>(lag));
  waiting.answer.version = protocol_.version();
  waiting.answer.lag = lag;
  StatusOr<at::Tensor> values = data_->read(waiting.keys);
  if (!values.ok()) {
    return answer(std::move(waiting.reply), annotate(values.status(), label()));
  }
  answer(std::move(waiting.reply), Reply{waiting.answer, {*std::move(values)}});
}

void Part::cancel(uint64_t token) {
  auto at = waiting_.extract(token);
  if (at.empty()) return;
  protocol_.cancel_pull(token);
  answer(std::move(at.mapped().reply),
         make_error(ErrorKind::kCancelled,
                    absl::StrCat(label(), ": the pull was given up while it waited")));
}

}  // namespace weft::ps::internal
