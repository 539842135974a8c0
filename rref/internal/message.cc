#include "weft/rref/internal/message.h"

#include "absl/strings/str_cat.h"

namespace weft::internal {
namespace {

struct Printer {
  std::string operator()(const SendMessage& e) const {
    return absl::StrCat("send to ", to_string(e.to), ": ", to_string(e.message));
  }
  std::string operator()(const HandleConfirmed& e) const {
    return absl::StrCat("confirmed ", to_string(e.handle.fork));
  }
  std::string operator()(const HandleFailed& e) const {
    return absl::StrCat("failed ", to_string(e.handle.fork), ": ", e.status.message());
  }
  std::string operator()(const ArrivalReady& e) const {
    return absl::StrCat("carrier ", e.carrier, " of ", to_string(e.from), " is ready");
  }
  std::string operator()(const ArrivalFailed& e) const {
    return absl::StrCat("carrier ", e.carrier, " of ", to_string(e.from),
                        " failed: ", e.status.message());
  }
  std::string operator()(const UseDone& e) const {
    return absl::StrCat("use ", e.token, " of ", to_string(e.rref), ": ",
                        e.status.ok() ? "value" : e.status.message());
  }
  std::string operator()(const ReleaseValue& e) const {
    return absl::StrCat("release ", to_string(e.rref));
  }
};

}  // namespace

const char* name(MessageKind kind) {
  switch (kind) {
    case MessageKind::kCreate: return "create";
    case MessageKind::kKnown: return "known";
    case MessageKind::kAbandon: return "abandon";
    case MessageKind::kFork: return "fork";
    case MessageKind::kDelete: return "delete";
    case MessageKind::kAccept: return "accept";
    case MessageKind::kAudit: return "audit";
  }
  return "unknown kind";
}

std::string to_string(const Message& m) {
  std::string text = absl::StrCat(name(m.kind), " #", m.seq);
  if (!m.rref.is_zero()) absl::StrAppend(&text, " ", to_string(m.rref));
  if (!m.fork.is_zero()) absl::StrAppend(&text, " ", to_string(m.fork));
  if (m.introduced_by != 0) absl::StrAppend(&text, " introduced by #", m.introduced_by);
  if (m.carrier != 0) absl::StrAppend(&text, " carrier ", m.carrier);
  for (const ForkId& fork : m.forks) absl::StrAppend(&text, " ", to_string(fork));
  absl::StrAppend(&text, " (floors ", m.floors.control, ", ", m.floors.carriers, ")");
  return text;
}

std::string to_string(const Effect& effect) { return std::visit(Printer(), effect); }

}  // namespace weft::internal
