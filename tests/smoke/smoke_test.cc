// The first test: everything that weft stands on, linked into one program. Mixed protobufs have a
// long history of crashes and link errors, and a new version of any of these packages can bring
// them back.
#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <google/protobuf/message.h>
#include <google/protobuf/struct.pb.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace {

absl::StatusOr<double> sum_of_gradient() {
  at::Tensor x = at::ones({3, 3}).set_requires_grad(true);
  at::mm(x, x).sum().backward();
  if (!x.grad().defined()) return absl::InternalError("backward left no gradient");
  return x.grad().sum().item<double>();
}

TEST(Smoke, AutogradRuns) {
  const absl::StatusOr<double> sum = sum_of_gradient();
  ASSERT_TRUE(sum.ok()) << sum.status();
  EXPECT_DOUBLE_EQ(*sum, 54.0);  // d/dx sum(x x) is 6 everywhere for ones(3, 3)
}

TEST(Smoke, ProtobufOfTheSystemIsUsed) {
  google::protobuf::Struct message;
  (*message.mutable_fields())["answer"].set_number_value(42);
  std::string bytes;
  ASSERT_TRUE(message.SerializeToString(&bytes));
  google::protobuf::Struct copy;
  ASSERT_TRUE(copy.ParseFromString(bytes));
  EXPECT_EQ(copy.fields().at("answer").number_value(), 42);
  // The wheel's own headers are of another version; generated code would say so here.
  GOOGLE_PROTOBUF_VERIFY_VERSION;
}

TEST(Smoke, GrpcAnswersBesideLibTorch) {
  ASSERT_TRUE(sum_of_gradient().ok());
  grpc::EnableDefaultHealthCheckService(true);
  grpc::AsyncGenericService service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterAsyncGenericService(&service);
  std::unique_ptr<grpc::ServerCompletionQueue> queue = builder.AddCompletionQueue();
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  EXPECT_GT(port, 0);
  server->Shutdown();
  queue->Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue->Next(&tag, &ok)) {
  }
}

}  // namespace
