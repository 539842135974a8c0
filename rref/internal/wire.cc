#include "weft/rref/internal/wire.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "google/protobuf/arena.h"
#include "weft/proto/rref.pb.h"

namespace weft::internal {
namespace {

// Maximum length of a creation's error text, which travels on to every holder.
constexpr size_t kMaxStatusText = 4 << 10;

Status violation(std::string_view what) {
  return make_error(ErrorKind::kProtocol, absl::StrCat("metadata of RRefs: ", std::string(what)));
}

template <class Record>
Status parse(std::string_view bytes, Record* record) {
  if (record->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return absl::OkStatus();
  return violation(absl::StrCat(bytes.size(), " bytes that cannot be parsed"));
}
template <class Record>
StatusOr<Record> parse(std::string_view bytes) {
  Record record;
  WEFT_RETURN_IF_ERROR(parse(bytes, &record));
  return record;
}

// What rides on calls has records inside; here they are no allocations.
class RequestRecord {
 public:
  RequestRecord()
      : arena_(block_, sizeof block_),
        record_(google::protobuf::Arena::CreateMessage<v1::RRefRequest>(&arena_)) {}
  RequestRecord(const RequestRecord&) = delete;
  RequestRecord& operator=(const RequestRecord&) = delete;

  v1::RRefRequest& operator*() { return *record_; }

 private:
  alignas(std::max_align_t) char block_[960];
  google::protobuf::Arena arena_;
  v1::RRefRequest* const record_;
};

void put(const WorkerKey& key, v1::WorkerKeyRecord* out) {
  out->set_id(key.id.value());
  out->set_incarnation(key.incarnation.value());
}
WorkerKey get(const v1::WorkerKeyRecord& in) {
  return WorkerKey{WorkerId(in.id()), Incarnation(in.incarnation())};
}
template <class Tag>
void put(const CreatedId<Tag>& id, v1::CreatedIdRecord* out) {
  put(id.creator, out->mutable_creator());
  out->set_counter(id.counter);
}
template <class Id>
Id get(const v1::CreatedIdRecord& in) {
  return Id{get(in.creator()), in.counter()};
}
void put(const Floors& floors, v1::RRefFloors* out) {
  out->set_control(floors.control);
  out->set_carriers(floors.carriers);
}
Floors get(const v1::RRefFloors& in) {
  return Floors{std::max<uint64_t>(1, in.control()), std::max<uint64_t>(1, in.carriers())};
}

template <class Record>
void put(const Status& status, Record* out) {
  if (status.ok()) return;
  out->set_code(static_cast<uint32_t>(status.code()));
  out->set_kind(static_cast<uint32_t>(error_kind(status)));
  out->set_message(std::string(status.message().substr(0, kMaxStatusText)));
}
template <class Record>
Status get_status(const Record& in) {
  if (in.code() == 0) return absl::OkStatus();
  const auto code = in.code() <= static_cast<uint32_t>(absl::StatusCode::kUnauthenticated)
                        ? static_cast<absl::StatusCode>(in.code())
                        : absl::StatusCode::kUnknown;
  const auto kind = in.kind() > 0 && in.kind() <= static_cast<uint32_t>(ErrorKind::kPermission)
                        ? static_cast<ErrorKind>(in.kind())
                        : ErrorKind::kUser;
  return make_error(code, kind, in.message().substr(0, kMaxStatusText));
}

void put(const Carrier& carrier, v1::RRefCarrier* out) {
  out->set_number(carrier.number);
  out->set_is_answer(carrier.is_answer);
  put(carrier.floors, out->mutable_floors());
  std::vector<WorkerKey> workers;
  const auto place = [&](const WorkerKey& key) {
    const auto at = std::find(workers.begin(), workers.end(), key);
    if (at != workers.end()) return static_cast<uint64_t>(at - workers.begin());
    workers.push_back(key);
    put(key, out->add_workers());
    return static_cast<uint64_t>(workers.size() - 1);
  };
  for (const Handle& handle : carrier.forks) {
    out->add_rrefs(place(handle.owner));
    out->add_rrefs(place(handle.rref.creator));
    out->add_rrefs(handle.rref.counter);
  }
  if (!carrier.forks.empty()) out->set_first_fork(carrier.forks.front().fork.counter);
}

StatusOr<Carrier> get(const WorkerKey& sender, const v1::RRefCarrier& in) {
  Carrier out;
  out.number = in.number();
  out.is_answer = in.is_answer();
  out.floors = get(in.floors());
  if (in.number() == 0) return violation("a carrier without a number");
  if (in.rrefs_size() == 0 || in.rrefs_size() % 3 != 0 || in.first_fork() == 0) {
    return violation(
        absl::StrCat("a carrier of ", in.rrefs_size(), " numbers, from fork ", in.first_fork()));
  }
  uint64_t fork = in.first_fork();
  for (int i = 0; i < in.rrefs_size(); i += 3, ++fork) {
    const auto places = static_cast<uint64_t>(in.workers_size());
    if (in.rrefs(i) >= places || in.rrefs(i + 1) >= places || in.rrefs(i + 2) == 0 || fork == 0) {
      return violation(absl::StrCat("reference ", i / 3, " of a carrier names worker ", in.rrefs(i),
                                    " and ", in.rrefs(i + 1), " of ", places, ", counter ",
                                    in.rrefs(i + 2)));
    }
    const auto worker = [&in](uint64_t place) { return get(in.workers(static_cast<int>(place))); };
    out.forks.push_back(Handle{RRefId{worker(in.rrefs(i + 1)), in.rrefs(i + 2)},
                               ForkId{sender, fork}, worker(in.rrefs(i))});
  }
  return out;
}

StatusOr<Message> get_item(const Floors& floors, const v1::RRefControl& in) {
  Message m;
  m.seq = in.seq();
  m.floors = floors;
  const auto ids = [&m](MessageKind kind, const auto& item) {
    m.kind = kind;
    m.rref = get<RRefId>(item.rref());
    m.fork = get<ForkId>(item.fork());
  };
  switch (in.item_case()) {
    case v1::RRefControl::kKnown: ids(MessageKind::kKnown, in.known()); break;
    case v1::RRefControl::kAbandon:
      ids(MessageKind::kAbandon, in.abandon());
      m.introduced_by = in.abandon().introduced_by();
      m.status = get_status(in.abandon());
      if (m.status.ok()) return violation("a creation that was abandoned without an error");
      break;
    case v1::RRefControl::kFork:
      ids(MessageKind::kFork, in.fork());
      m.parent = get(in.fork().parent());
      break;
    case v1::RRefControl::kDelete:
      ids(MessageKind::kDelete, in.delete_());
      m.introduced_by = in.delete_().introduced_by();
      break;
    case v1::RRefControl::kAccept:
      m.kind = MessageKind::kAccept;
      m.carrier = in.accept().carrier();
      return m;
    case v1::RRefControl::kAudit:
      m.kind = MessageKind::kAudit;
      m.carrier = in.audit().carrier();
      for (const v1::CreatedIdRecord& fork : in.audit().forks()) {
        m.forks.push_back(get<ForkId>(fork));
      }
      return m;
    case v1::RRefControl::ITEM_NOT_SET: return violation("a control item of unknown kind");
  }
  if (m.rref.is_zero() || m.fork.is_zero()) return violation("a control item without ids");
  return m;
}

}  // namespace

namespace {

StatusOr<Use> get(const WorkerKey& sender, const v1::RRefUse& in) {
  if (in.counter() == 0) return violation("a use without an id");
  const auto worker = [&sender](uint32_t id, uint64_t incarnation) {
    return incarnation == 0 ? sender : WorkerKey{WorkerId(id), Incarnation(incarnation)};
  };
  Use out{RRefId{worker(in.creator(), in.creator_incarnation()), in.counter()}, ForkId(),
          in.introduced_by()};
  if (in.fork_counter() != 0) {
    out.fork = ForkId{worker(in.fork_creator(), in.fork_creator_incarnation()), in.fork_counter()};
  }
  return out;
}

// The bytes of the use in a request that has a use and nothing else, as every method call is. They
// can be read without a record around them.
std::string_view use_alone(std::string_view request) {
  constexpr char kTag = (v1::RRefRequest::kUseFieldNumber << 3) | 2;
  const bool alone = request.size() > 2 && request.size() < 130 && request[0] == kTag &&
                     static_cast<uint8_t>(request[1]) == request.size() - 2;
  return alone ? request.substr(2) : std::string_view();
}

}  // namespace

std::string encode(const WorkerKey& sender, const RequestData& request) {
  RequestRecord record;
  v1::RRefRequest& out = *record;
  if (request.creation.has_value()) {
    const Creation& c = *request.creation;
    put(c.rref, out.mutable_creation()->mutable_rref());
    if (!c.fork.is_zero()) put(c.fork, out.mutable_creation()->mutable_fork());
    out.mutable_creation()->set_seq(c.seq);
    put(c.floors, out.mutable_creation()->mutable_floors());
  }
  if (request.use.has_value()) {
    const Use& u = *request.use;
    v1::RRefUse* const use = out.mutable_use();
    if (u.rref.creator != sender) {
      use->set_creator(u.rref.creator.id.value());
      use->set_creator_incarnation(u.rref.creator.incarnation.value());
    }
    use->set_counter(u.rref.counter);
    if (!u.fork.is_zero() && u.fork.creator != sender) {
      use->set_fork_creator(u.fork.creator.id.value());
      use->set_fork_creator_incarnation(u.fork.creator.incarnation.value());
    }
    use->set_fork_counter(u.fork.counter);
    use->set_introduced_by(u.introduced_by);
  }
  if (request.carrier.has_value()) put(*request.carrier, out.mutable_carrier());
  return out.SerializeAsString();
}

StatusOr<RequestData> decode_request(const WorkerKey& sender, std::string_view bytes) {
  if (const std::string_view alone = use_alone(bytes); !alone.empty()) {
    v1::RRefUse use;
    WEFT_RETURN_IF_ERROR(parse(alone, &use));
    RequestData out;
    WEFT_ASSIGN_OR_RETURN(out.use, get(sender, use));
    return out;
  }
  RequestRecord record;
  WEFT_RETURN_IF_ERROR(parse(bytes, &*record));
  const v1::RRefRequest& in = *record;
  RequestData out;
  if (in.has_creation()) {
    Creation c;
    c.rref = get<RRefId>(in.creation().rref());
    c.fork = get<ForkId>(in.creation().fork());
    c.seq = in.creation().seq();
    c.floors = get(in.creation().floors());
    if (c.rref.is_zero() || c.fork.is_zero() != (c.seq == 0)) {
      return violation("a creation without ids or number");
    }
    out.creation = c;
  }
  if (in.has_use()) {
    WEFT_ASSIGN_OR_RETURN(out.use, get(sender, in.use()));
  }
  if (in.has_carrier()) {
    WEFT_ASSIGN_OR_RETURN(out.carrier, get(sender, in.carrier()));
    if (out.carrier->is_answer) return violation("the carrier of an answer on a request");
  }
  return out;
}

std::string encode(const Carrier& carrier) {
  v1::RRefCarrier out;
  put(carrier, &out);
  return out.SerializeAsString();
}

StatusOr<Carrier> decode_carrier(const WorkerKey& sender, std::string_view bytes) {
  WEFT_ASSIGN_OR_RETURN(const v1::RRefCarrier in, parse<v1::RRefCarrier>(bytes));
  WEFT_ASSIGN_OR_RETURN(Carrier out, get(sender, in));
  if (!out.is_answer) return violation("the carrier of a request on an answer");
  return out;
}

std::string encode(const std::vector<Message>& items) {
  v1::RRefControlBatch out;
  Floors floors;
  for (const Message& m : items) {
    floors.control = std::max(floors.control, m.floors.control);
    floors.carriers = std::max(floors.carriers, m.floors.carriers);
    v1::RRefControl* item = out.add_items();
    item->set_seq(m.seq);
    const auto ids = [&m](auto* to) {
      put(m.rref, to->mutable_rref());
      put(m.fork, to->mutable_fork());
    };
    switch (m.kind) {
      case MessageKind::kCreate: break;
      case MessageKind::kKnown: ids(item->mutable_known()); break;
      case MessageKind::kAbandon:
        ids(item->mutable_abandon());
        item->mutable_abandon()->set_introduced_by(m.introduced_by);
        put(m.status, item->mutable_abandon());
        break;
      case MessageKind::kFork:
        ids(item->mutable_fork());
        put(m.parent, item->mutable_fork()->mutable_parent());
        break;
      case MessageKind::kDelete:
        ids(item->mutable_delete_());
        item->mutable_delete_()->set_introduced_by(m.introduced_by);
        break;
      case MessageKind::kAccept: item->mutable_accept()->set_carrier(m.carrier); break;
      case MessageKind::kAudit:
        item->mutable_audit()->set_carrier(m.carrier);
        for (const ForkId& fork : m.forks) put(fork, item->mutable_audit()->add_forks());
        break;
    }
  }
  put(floors, out.mutable_floors());
  return out.SerializeAsString();
}

StatusOr<std::vector<ReceivedItem>> decode_items(std::string_view bytes) {
  WEFT_ASSIGN_OR_RETURN(const v1::RRefControlBatch in, parse<v1::RRefControlBatch>(bytes));
  const Floors floors = get(in.floors());
  std::vector<ReceivedItem> out;
  for (const v1::RRefControl& item : in.items()) {
    if (item.seq() == 0) return violation("a control item without a number");
    out.push_back(ReceivedItem{item.seq(), get_item(floors, item)});
  }
  return out;
}

std::string encode(const std::vector<NumberedReply>& replies) {
  v1::RRefControlBatchReply out;
  for (const auto& [seq, reply] : replies) {
    v1::RRefControlReply* item = out.add_items();
    item->set_seq(seq);
    put(reply.status, item);
    for (const Holds holds : reply.holds) {
      item->add_holds(static_cast<v1::RRefControlReply::Holds>(holds));
    }
  }
  return out.SerializeAsString();
}

StatusOr<std::vector<NumberedReply>> decode_replies(std::string_view bytes) {
  WEFT_ASSIGN_OR_RETURN(const v1::RRefControlBatchReply in,
                        parse<v1::RRefControlBatchReply>(bytes));
  std::vector<NumberedReply> out;
  for (const v1::RRefControlReply& item : in.items()) {
    Reply reply;
    reply.status = get_status(item);
    for (const int holds : item.holds()) {
      if (holds < 0 || holds > 2) return violation(absl::StrCat("holds = ", holds));
      reply.holds.push_back(static_cast<Holds>(holds));
    }
    out.emplace_back(item.seq(), std::move(reply));
  }
  return out;
}

}  // namespace weft::internal
