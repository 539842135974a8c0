#ifndef WEFT_TRANSPORT_INTERNAL_GRPC_BACKENDS_H_
#define WEFT_TRANSPORT_INTERNAL_GRPC_BACKENDS_H_

#include <memory>
#include <vector>

#include "weft/transport/channel.h"
#include "weft/transport/grpc_transport.h"
#include "weft/transport/internal/local/gate.h"

namespace weft::internal {

// The channel backends of a grpc transport, by its options. The one place that names them.
std::vector<std::shared_ptr<ChannelBackend>> make_channel_backends(
    const TransportContext& context, const GrpcTransportOptions& options, bool tls,
    const std::shared_ptr<LocalGate>& gate);

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_GRPC_BACKENDS_H_
