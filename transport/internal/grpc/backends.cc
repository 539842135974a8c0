#include "weft/transport/internal/grpc/backends.h"

#include "weft/transport/internal/arena/channel.h"
#include "weft/transport/internal/data/channel.h"

namespace weft::internal {

std::vector<std::shared_ptr<ChannelBackend>> make_channel_backends(
    const TransportContext& context, const GrpcTransportOptions& options, bool tls,
    const std::shared_ptr<LocalGate>& gate) {
  DataBackend::Options data;
  data.enabled = options.data_connections;
  data.tls = tls;
  data.max_frame_bytes = context.max_frame_bytes;
  data.handshake_timeout = options.handshake_timeout;
  data.keepalive_timeout = options.keepalive_timeout;
  data.max_spin = options.max_spin;
  data.sockets = std::make_shared<OptionalSockets>(context.runtime);
  return {std::make_shared<ArenaBackend>(context.runtime, gate, options.arena_bytes),
          std::make_shared<DataBackend>(context.runtime, data)};
}

}  // namespace weft::internal
