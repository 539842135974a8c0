#include "weft/ps/internal/batch_wire.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "weft/proto/ps.pb.h"
#include "weft/ps/internal/copy_wire.h"

namespace weft::ps::internal {
namespace {

constexpr size_t kMostRequests = 4096;

Status wrong_batch(std::string_view what) {
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat("batch of a parameter server: ", std::string(what)));
}

// Deals the tensors of a message to its parts.
class Dealer {
 public:
  explicit Dealer(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}
  StatusOr<std::vector<at::Tensor>> take(uint32_t count) {
    if (count > tensors_.size() - used_) {
      return wrong_batch(absl::StrCat("more tensors than the ", tensors_.size(), " that came"));
    }
    std::vector<at::Tensor> out;
    for (uint32_t i = 0; i < count; ++i) out.push_back(std::move(tensors_[used_++]));
    return out;
  }
  Status finish() const {
    if (used_ == tensors_.size()) return absl::OkStatus();
    return wrong_batch("tensors that belong to nothing");
  }

 private:
  std::vector<at::Tensor> tensors_;
  size_t used_ = 0;
};

template <class Record>
Status parse_batch(std::string_view bytes, Record* record) {
  if (record->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return absl::OkStatus();
  return wrong_batch(absl::StrCat(bytes.size(), " bytes that cannot be parsed"));
}

// ---- runs --------------------------------------------------------------------------------------

bool is_rows(const at::Tensor& keys, const at::Tensor& rows) {
  return keys.defined() && rows.defined() && keys.is_cpu() && rows.is_cpu() &&
         keys.layout() == at::kStrided && rows.layout() == at::kStrided && keys.dim() == 1 &&
         rows.dim() == 2 && keys.scalar_type() == c10::ScalarType::Long &&
         keys.size(0) == rows.size(0) && keys.is_contiguous() && rows.is_contiguous();
}

// A push of rows, and nothing else.
bool may_be_in_run(const BatchedRequest& one) {
  const Request& r = one.request;
  return r.push.has_value() && !r.enter.has_value() && !r.advance.has_value() &&
         !r.pull.has_value() && !r.leave && one.tensors.size() == 2 &&
         is_rows(one.tensors[0], one.tensors[1]);
}

// `b` may come after `a` in a run.
bool may_follow(const BatchedRequest& a, const BatchedRequest& b) {
  const PushHeader& p = *a.request.push;
  const PushHeader& q = *b.request.push;
  return a.request.part == b.request.part && a.request.client == b.request.client &&
         a.request.epoch == b.request.epoch && p.number < q.number && p.floor <= q.floor &&
         p.clock == q.clock && p.version == q.version && p.kind == q.kind && p.rate == q.rate &&
         a.tensors[1].scalar_type() == b.tensors[1].scalar_type() &&
         a.tensors[1].size(1) == b.tensors[1].size(1);
}

// One after the other along the first dimension.
at::Tensor strung(const std::vector<const BatchedRequest*>& batch, size_t first, size_t end,
                  size_t which) {
  const at::Tensor& pattern = batch[first]->tensors[which];
  std::vector<int64_t> shape = pattern.sizes().vec();
  shape[0] = 0;
  for (size_t i = first; i < end; ++i) shape[0] += batch[i]->tensors[which].size(0);
  at::Tensor out = at::empty(shape, pattern.options());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for (size_t i = first; i < end; ++i) {
    const at::Tensor& from = batch[i]->tensors[which];
    if (from.nbytes() != 0) std::memcpy(to, from.const_data_ptr(), from.nbytes());
    to += from.nbytes();
  }
  return out;
}

Status get_run(const v1::PsRun& in, BatchedRequest* one) {
  const auto wrong = [](std::string_view what) {
    return wrong_batch(absl::StrCat("a run ", std::string(what)));
  };
  const int count = in.keys_size();
  if (count < 2 || in.numbers_size() != count - 1 || in.floors_size() != count - 1) {
    return wrong(absl::StrCat("of ", count, " pushes with ", in.numbers_size(), " numbers and ",
                              in.floors_size(), " floors after the first"));
  }
  if (!may_be_in_run(*one)) return wrong("of requests that are no pushes of rows alone");
  one->run.reserve(static_cast<size_t>(count));
  RunPush push{one->request.push->number, one->request.push->floor, in.keys(0)};
  uint64_t keys = push.keys;
  one->run.push_back(push);
  for (int i = 1; i < count; ++i) {
    const uint64_t by = in.numbers(i - 1);
    const uint64_t floor_by = in.floors(i - 1);
    // The floor is at most the number, before and after.
    if (by == 0 || by > UINT64_MAX - push.number || floor_by > push.number + by - push.floor) {
      return wrong(absl::StrCat("with push ", push.number, ", and then one ", by,
                                " above with floor ", floor_by, " above ", push.floor));
    }
    push = {push.number + by, push.floor + floor_by, in.keys(i)};
    keys += push.keys;
    one->run.push_back(push);
  }
  if (keys != static_cast<uint64_t>(one->tensors[0].size(0))) {
    return wrong(absl::StrCat("of ", keys, " keys, and ", one->tensors[0].size(0), " came"));
  }
  return absl::OkStatus();
}

void put_run(const std::vector<RunPush>& run, uint32_t request, v1::PsRun* out) {
  out->set_request(request);
  for (size_t i = 0; i < run.size(); ++i) {
    out->add_keys(run[i].keys);
    if (i == 0) continue;
    out->add_numbers(run[i].number - run[i - 1].number);
    out->add_floors(run[i].floor - run[i - 1].floor);
  }
}

// What an answer that stands for others may be.
bool may_stand(const BatchedResult& result) {
  return result.said.ok() && result.said->tensors.empty() && !result.said->answer.moved &&
         result.said->answer.map.epoch == 0;
}

}  // namespace

Batch in_runs(const std::vector<const BatchedRequest*>& batch) {
  Batch out;
  for (size_t i = 0; i < batch.size();) {
    size_t end = i + 1;
    if (may_be_in_run(*batch[i])) {
      while (end < batch.size() && may_be_in_run(*batch[end]) &&
             may_follow(*batch[end - 1], *batch[end])) {
        ++end;
      }
    }
    if (end == i + 1) {
      out.push_back(*batch[i++]);
      continue;
    }
    BatchedRequest run{batch[i]->request, {strung(batch, i, end, 0), strung(batch, i, end, 1)}};
    run.run.reserve(end - i);
    for (; i < end; ++i) {
      const PushHeader& push = *batch[i]->request.push;
      run.run.push_back(
          {push.number, push.floor, static_cast<uint32_t>(batch[i]->tensors[0].size(0))});
    }
    out.push_back(std::move(run));
  }
  return out;
}

Answer answer_after(const Answer& first, uint32_t after) {
  Answer out = first;
  out.version += after;
  out.behind += after;
  return out;
}

void add(BatchedResult result, Results* results) {
  if (!results->empty() && may_stand(results->back()) && may_stand(result)) {
    BatchedResult& last = results->back();
    const Answer& a = last.said->answer;
    const Answer& b = result.said->answer;
    const uint64_t next = uint64_t{last.more} + 1;
    if (b.version == a.version + next && b.behind == a.behind + next && b.clock == a.clock &&
        b.dropped == a.dropped && b.lag == a.lag) {
      last.more += 1 + result.more;
      return;
    }
  }
  results->push_back(std::move(result));
}

std::string encode(const Batch& batch) {
  v1::PsBatch out;
  for (size_t i = 0; i < batch.size(); ++i) {
    put(batch[i].request, out.add_requests());
    out.add_tensors(static_cast<uint32_t>(batch[i].tensors.size()));
    if (!batch[i].run.empty()) put_run(batch[i].run, static_cast<uint32_t>(i), out.add_runs());
  }
  return out.SerializeAsString();
}

StatusOr<Batch> decode_batch(std::string_view bytes, std::vector<at::Tensor> tensors) {
  v1::PsBatch in;
  WEFT_RETURN_IF_ERROR(parse_batch(bytes, &in));
  if (in.requests_size() == 0 || in.requests_size() != in.tensors_size()) {
    return wrong_batch(absl::StrCat(in.requests_size(), " requests and ", in.tensors_size(),
                                    " numbers of tensors"));
  }
  size_t count = static_cast<size_t>(in.requests_size());
  for (const v1::PsRun& run : in.runs()) {
    count += static_cast<size_t>(std::max(1, run.keys_size())) - 1;
  }
  if (count > kMostRequests) {
    return wrong_batch(absl::StrCat(count, " requests, the most are ", kMostRequests));
  }
  Dealer dealer(std::move(tensors));
  Batch out;
  out.reserve(static_cast<size_t>(in.requests_size()));
  int run = 0;
  for (int i = 0; i < in.requests_size(); ++i) {
    BatchedRequest one;
    WEFT_ASSIGN_OR_RETURN(one.request, get(in.requests(i)));
    WEFT_ASSIGN_OR_RETURN(one.tensors, dealer.take(in.tensors(i)));
    if (run < in.runs_size() && in.runs(run).request() == static_cast<uint32_t>(i)) {
      WEFT_RETURN_IF_ERROR(get_run(in.runs(run++), &one));
    }
    out.push_back(std::move(one));
  }
  if (run != in.runs_size())
    return wrong_batch("a run of a request that is not there, or was before");
  WEFT_RETURN_IF_ERROR(dealer.finish());
  return out;
}

std::string encode(const Results& results) {
  v1::PsResults out;
  for (const auto& [said, more] : results) {
    v1::PsResult* one = out.add_results();
    if (!said.ok()) {
      put(said.status(), one->mutable_error());
      continue;
    }
    put(said->answer, one->mutable_answer());
    one->set_tensors(static_cast<uint32_t>(said->tensors.size()));
    if (more != 0) one->set_more(more);
  }
  return out.SerializeAsString();
}

StatusOr<Results> decode_results(std::string_view bytes, std::vector<at::Tensor> tensors) {
  v1::PsResults in;
  WEFT_RETURN_IF_ERROR(parse_batch(bytes, &in));
  Dealer dealer(std::move(tensors));
  Results out;
  out.reserve(static_cast<size_t>(in.results_size()));
  for (const v1::PsResult& one : in.results()) {
    const Status error = get(one.error());
    if (one.has_answer() == !error.ok() || (!error.ok() && one.tensors() > 0)) {
      return wrong_batch("a result that is not either an answer or an error");
    }
    BatchedResult result;
    result.more = one.more();
    if (!error.ok()) {
      result.said = error;
    } else {
      WEFT_ASSIGN_OR_RETURN(result.said->answer, get(one.answer()));
      WEFT_ASSIGN_OR_RETURN(result.said->tensors, dealer.take(one.tensors()));
    }
    if (result.more != 0) {
      if (!may_stand(result) || result.more >= kMostRequests ||
          result.said->answer.version > UINT64_MAX - result.more ||
          result.said->answer.behind > UINT64_MAX - result.more) {
        return wrong_batch(
            absl::StrCat("a result that cannot stand for ", result.more, " after it"));
      }
    }
    out.push_back(std::move(result));
  }
  WEFT_RETURN_IF_ERROR(dealer.finish());
  return out;
}

}  // namespace weft::ps::internal
