// A Part whose state at a cut is kept for a snapshot, and one that is made from a snapshot.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/ps/internal/part.h"

namespace weft::ps::internal {

void Part::begin_cut(const CutName& cut, absl::Time until, CutReply<std::vector<ClientKey>> reply) {
  take_turn([this, cut, until, reply = std::move(reply)]() mutable {
    const absl::Time now = runtime_->now();
    if (!owns() || !closed_.ok()) {
      return reply(make_error(ErrorKind::kUnavailable,
                              absl::StrCat(label(), ": this server does not own it any more")));
    }
    if (cut_.has_value() && cut_->name != cut && now < cut_->until) {
      return reply(make_error(ErrorKind::kUnavailable,
                              absl::StrCat(label(), ": another snapshot is being cut")));
    }
    end_cut(
        make_error(ErrorKind::kUnavailable, absl::StrCat(label(), ": the cut was begun again")));
    cut_ = OpenCut{cut, until, {}, {}};
    reply(protocol_.client_keys());
  });
}

void Part::take_cut(const CutName& cut, std::vector<CutNeed> needs, CutReply<PartCut> reply) {
  take_turn([this, cut, needs = std::move(needs), reply = std::move(reply)]() mutable {
    if (!cut_.has_value() || cut_->name != cut || cut_->reply != nullptr) {
      return reply(make_error(ErrorKind::kUnavailable,
                              absl::StrCat(label(), ": the cut is not open any more")));
    }
    cut_->needs = std::move(needs);
    cut_->reply = std::move(reply);
    publish();
  });
}

void Part::drop_cut(const CutName& cut) {
  take_turn([this, cut] {
    if (!cut_.has_value() || cut_->name != cut) return;
    end_cut(make_error(ErrorKind::kUnavailable, absl::StrCat(label(), ": the cut was dropped")));
  });
}

void Part::end_cut(const Status& why) {
  std::optional<OpenCut> cut = std::exchange(cut_, std::nullopt);
  if (cut.has_value() && cut->reply != nullptr) cut->reply(why);
}

bool Part::keeps_out(const ClientKey& client, const Request& request) const {
  return request.enter.has_value() && cut_.has_value() && !protocol_.has_client(client) &&
         runtime_->now() < cut_->until;
}

void Part::settle_cut() {
  if (!cut_.has_value() || cut_->reply == nullptr) return;
  if (runtime_->now() >= cut_->until) {
    return end_cut(make_error(
        ErrorKind::kUnavailable,
        absl::StrCat(label(),
                     ": what its clients have begun did not come in the time of the cut")));
  }
  const bool complete = std::all_of(cut_->needs.begin(), cut_->needs.end(), [&](const CutNeed& n) {
    return protocol_.has_seen(n.client, n.push, n.clock);
  });
  if (!complete) return;
  auto taken = std::make_shared<PartCut>(freeze());
  auto reply = std::make_shared<CutReply<PartCut>>(std::move(cut_->reply));
  cut_.reset();
  // As a read: an owner that has a successor by now gives away nothing.
  if (replica_.has_value()) append({});
  answer(
      [taken, reply, name = label()](const StatusOr<Reply>& said) {
        if (said.ok() && !said->answer.moved) return (*reply)(std::move(*taken));
        (*reply)(make_error(ErrorKind::kUnavailable,
                            absl::StrCat(name, ": the part has moved while it was cut")));
      },
      Reply{});
}

PartCut Part::freeze() {
  PartCut out{{identity_.definition, identity_.servers, protocol_.image(), {}}, {}, {}};
  for (const ProtocolImage::Held& held : out.image.protocol.held) {
    const Push& push = pushes_.at(held.token);
    const std::vector<at::Tensor> of_push = data_->pack(push);
    out.image.pushes.push_back({push.kind, push.rate, static_cast<uint32_t>(of_push.size())});
    for (const at::Tensor& t : of_push) out.held.push_back(t.contiguous());
  }
  out.data = data_->freeze();
  return out;
}

Status Part::take_up(const PartImage& from, std::vector<at::Tensor> tensors,
                     const std::function<void()>& between) {
  size_t used = 0;
  data_->follow(true);
  for (size_t i = 0; i < from.pushes.size(); ++i) {
    const PartImage::HeldPush& held = from.pushes[i];
    const size_t wanted = data_->push_tensors();
    if (held.tensors != wanted || tensors.size() - used < wanted) {
      return make_error(ErrorKind::kProtocol, "image whose held pushes lack tensors");
    }
    PushHeader header;
    header.kind = held.kind;
    header.rate = held.rate;
    std::vector<at::Tensor> own(tensors.begin() + static_cast<long>(used),
                                tensors.begin() + static_cast<long>(used + wanted));
    used += wanted;
    WEFT_ASSIGN_OR_RETURN(Push push, data_->accept(header, std::move(own)));
    const uint64_t token = from.protocol.held[i].token;
    last_token_ = std::max(last_token_, token);
    limits_->queued.fetch_add(push.bytes());
    metrics_.held_bytes->add(push.bytes());
    pushes_.emplace(token, std::move(push));
  }
  WEFT_RETURN_IF_ERROR(
      data_->load({tensors.begin() + static_cast<long>(used), tensors.end()}, between));
  protocol_.load(from.protocol);
  return absl::OkStatus();
}

Status restored_since(const RestoredTable& table, const ClientKey& client) {
  const auto known = table.pushes.find(client);
  const std::string have =
      known == table.pushes.end()
          ? "it has no push of this client"
          : absl::StrCat("of this client it has the pushes up to ", known->second);
  return make_error(ErrorKind::kState,
                    absl::StrCat("table '", table.table, "' was restored from '", table.snapshot,
                                 "': ", have, "; open it again"));
}

Status Part::check_restored(const ClientKey& client, const Request& request) const {
  if (restored_ == nullptr || request.enter.has_value() || protocol_.has_client(client)) {
    return absl::OkStatus();
  }
  const bool takes_part = request.push.has_value() || request.advance.has_value() ||
                          (request.pull.has_value() && request.pull->clock.has_value());
  return takes_part ? restored_since(*restored_, client) : absl::OkStatus();
}

Status Part::restore(const PartImage& image, std::vector<at::Tensor> tensors,
                     std::shared_ptr<const RestoredTable> from) {
  // LibTorch may throw, for want of memory.
  Status result =
      make_error(ErrorKind::kResource, absl::StrCat(label(), ": it could not be loaded"));
  take_turn([&, this] {
    if (tensors.empty()) {  // a sparse part without rows
      protocol_.load(image.protocol);
      result = absl::OkStatus();
    } else {
      result = take_up(image, std::move(tensors));
    }
    if (!result.ok()) return fail_all(result);
    data_->follow(false);
    restored_ = std::move(from);
    publish();
  });
  return result;
}

}  // namespace weft::ps::internal
