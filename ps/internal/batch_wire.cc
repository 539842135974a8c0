#include "weft/ps/internal/batch_wire.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/proto/ps.pb.h"
#include "weft/ps/internal/copy_wire.h"

namespace weft::ps::internal {
namespace {

constexpr int kMostRequests = 4096;

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

}  // namespace

std::string encode(const std::vector<const BatchedRequest*>& batch) {
  v1::PsBatch out;
  for (const BatchedRequest* one : batch) {
    put(one->request, out.add_requests());
    out.add_tensors(static_cast<uint32_t>(one->tensors.size()));
  }
  return out.SerializeAsString();
}

std::string encode(const Batch& batch) {
  std::vector<const BatchedRequest*> all;
  for (const BatchedRequest& one : batch) all.push_back(&one);
  return encode(all);
}

StatusOr<Batch> decode_batch(std::string_view bytes, std::vector<at::Tensor> tensors) {
  v1::PsBatch in;
  WEFT_RETURN_IF_ERROR(parse_batch(bytes, &in));
  if (in.requests_size() == 0 || in.requests_size() != in.tensors_size()) {
    return wrong_batch(absl::StrCat(in.requests_size(), " requests and ", in.tensors_size(),
                                    " numbers of tensors"));
  }
  if (in.requests_size() > kMostRequests) {
    return wrong_batch(absl::StrCat(in.requests_size(), " requests, the most are ", kMostRequests));
  }
  Dealer dealer(std::move(tensors));
  Batch out;
  out.reserve(static_cast<size_t>(in.requests_size()));
  for (int i = 0; i < in.requests_size(); ++i) {
    BatchedRequest one;
    WEFT_ASSIGN_OR_RETURN(one.request, get(in.requests(i)));
    WEFT_ASSIGN_OR_RETURN(one.tensors, dealer.take(in.tensors(i)));
    out.push_back(std::move(one));
  }
  WEFT_RETURN_IF_ERROR(dealer.finish());
  return out;
}

std::string encode(const Results& results) {
  v1::PsResults out;
  for (const StatusOr<Reply>& result : results) {
    v1::PsResult* one = out.add_results();
    if (!result.ok()) {
      put(result.status(), one->mutable_error());
      continue;
    }
    put(result->answer, one->mutable_answer());
    one->set_tensors(static_cast<uint32_t>(result->tensors.size()));
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
    if (!error.ok()) {
      out.emplace_back(error);
      continue;
    }
    Reply reply;
    WEFT_ASSIGN_OR_RETURN(reply.answer, get(one.answer()));
    WEFT_ASSIGN_OR_RETURN(reply.tensors, dealer.take(one.tensors()));
    out.emplace_back(std::move(reply));
  }
  WEFT_RETURN_IF_ERROR(dealer.finish());
  return out;
}

}  // namespace weft::ps::internal
