// Any bytes as what servers and clients say to each other about the copies of a part, as a part's map in
// the store, as several requests that travel together and what is said to them, as what is said about moves and
// servers that join, about memory that processes of a host share, or as the manifest of a snapshot and a part's state in its files: an error of kind protocol (of a manifest: invalid_argument, with
// its path), or something that encodes to bytes that mean the same. An image that is accepted can be taken up,
// and its clients may leave: nothing of it makes that endless. A manifest that is accepted names a file for each
// part of each table.
//
// Input: a byte that says which of the fourteen, a byte with how many tensors came beside the message, then
// the message.

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/ops/zeros.h"
#include "weft/proto/ps_snapshot.pb.h"
#include "weft/ps/internal/batch_wire.h"
#include "weft/ps/internal/copy_wire.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/move_wire.h"
#include "weft/ps/internal/part_protocol.h"
#include "weft/ps/internal/shared_wire.h"
#include "weft/ps/internal/snapshot_files.h"
#include "weft/tests/fuzz/target.h"

namespace {

using namespace weft::ps::internal;  // NOLINT: the target's whole subject
using weft::Status;
using weft::StatusOr;

template <class Decode, class Check>
Status twice(std::string_view bytes, const Decode& decode, const Check& check) {
  const auto value = decoded(bytes.size(), [&] { return decode(bytes); });
  if (!value.ok()) {
    require(weft::error_kind(value.status()) == weft::ErrorKind::kProtocol);
    return value.status();
  }
  check(*value);
  const std::string again = encode(*value);
  const auto same = decode(again);
  require(same.ok() && encode(*same) == again);
  return absl::OkStatus();
}

void check_map(const RangeMap& map) {
  require(map.epoch != 0 && !map.owner.empty());
  require(!map.ready || !map.backup.empty());
}

// As a server that becomes the backup does, and then its clients leave it.
void check_image(const PartImage& image) {
  require(weft::ps::internal::check_definition(image.definition).ok());
  require(image.pushes.size() == image.protocol.held.size());
  PartProtocol protocol(image.definition.consistency);
  protocol.load(image.protocol);
  PartImage after = image;
  after.protocol = protocol.image();
  require(encode(after) == encode(image));
  PartEffects effects;
  protocol.worker_gone({weft::WorkerId(UINT32_MAX), weft::Incarnation(1)}, &effects);
  for (const ProtocolImage::Client& client : image.protocol.clients) {
    protocol.leave(client.key, &effects);
  }
  // A step with pushes each, and between them some without.
  require(effects.size() <= 1 + image.protocol.clients.size() + 2 * image.protocol.held.size());
}

void check_copy(const CopyRequest& request) {
  check_map(request.map);
  require(check_name(request.name).ok());
  require(!request.image.has_value() || request.entries.empty());
  require(request.entries.empty() || request.position != 0);
  if (!request.image.has_value()) return;
  const PartImage& image = *request.image;
  require(request.index < part_count(image.definition, image.servers.size()));
  check_image(image);
}

Status manifest(std::string_view bytes) {
  weft::v1::PsSnapshot read;
  const Status s = decoded(bytes.size(), [&] { return decode_manifest(bytes, "/m", &read); });
  if (!s.ok()) {
    require(weft::error_kind(s) == weft::ErrorKind::kInvalidArgument);
    require(s.message().find("'/m'") != std::string_view::npos);
    return s;
  }
  for (const weft::v1::PsSnapshot::Table& table : read.tables()) {
    require(table.servers_size() > 0 && table.files_size() > 0);
    for (const uint32_t file : table.files()) {
      require(read.files(static_cast<int>(file)).name().find('/') == std::string::npos);
    }
  }
  weft::v1::PsSnapshot again;
  const std::string encoded = read.SerializeAsString();
  require(decode_manifest(encoded, "/m", &again).ok() && again.SerializeAsString() == encoded);
  return s;
}

Status servers(std::string_view bytes) {
  const auto names = decoded(bytes.size(), [&] { return decode_servers(bytes); });
  if (!names.ok()) {
    require(weft::error_kind(names.status()) == weft::ErrorKind::kProtocol);
    return names.status();
  }
  require(names->size() <= kMostServers && std::is_sorted(names->begin(), names->end()));
  require(decode_servers(encode_servers(*names)).value() == *names);
  return absl::OkStatus();
}

// Every second tensor has four keys, and those between them four rows: a run is of as many.
Status batch_of(std::string_view bytes, size_t tensors) {
  std::vector<at::Tensor> beside;
  for (size_t i = 0; i < tensors; ++i) {
    beside.push_back(i % 2 == 0 ? at::zeros({4}, at::kLong) : at::zeros({4, 2}));
  }
  std::vector<at::Tensor> again = beside;
  const auto decode = [&](std::string_view b) {
    return decode_batch(b, std::exchange(beside, std::exchange(again, {})));
  };
  return twice(bytes, decode, [&](const Batch& batch) {
    size_t dealt = 0;
    for (const BatchedRequest& one : batch) {
      require(one.request.part != 0 && one.request.client != 0);
      dealt += one.tensors.size();
      require(one.run.empty() || one.tensors.size() == 2);
      uint64_t keys = 0;
      for (size_t i = 0; i < one.run.size(); ++i) {
        const RunPush& push = one.run[i];
        keys += push.keys;
        require(push.floor != 0 && push.floor <= push.number);
        require(i == 0 ? push.number == one.request.push->number
                       : push.number > one.run[i - 1].number && push.floor >= one.run[i - 1].floor);
      }
      require(one.run.empty() || keys == 4);
    }
    require(!batch.empty() && dealt == tensors);
  });
}

}  // namespace

// An entry or client of no bytes takes two on the wire. It becomes some 280 bytes in memory (an
// entry has room for a whole request), beside 80 of protobuf's and a pointer to those.
const size_t kMostBytesPerByte = 224;

Status fuzz_one(std::string_view input) {
  if (input.size() < 2) return absl::OkStatus();
  const std::string_view bytes = input.substr(2);
  const size_t tensors = static_cast<uint8_t>(input[1]) % 8;
  const auto nothing = [](const auto&) {};
  switch (static_cast<uint8_t>(input[0]) % 14) {
    case 0:
      return twice(bytes, decode_find,
                   [](const FindRequest& find) { require(check_name(find.name).ok()); });
    case 1:
      return twice(bytes, decode_found, [](const FindAnswer& found) {
        if (found.map.epoch != 0) check_map(found.map);
      });
    case 2:
      return twice(
          bytes,
          [&](std::string_view b) {
            std::vector<at::Tensor> beside(tensors);
            return decode_copy(b, &beside);
          },
          check_copy);
    case 3: return twice(bytes, decode_copied, nothing);
    case 4: return twice(bytes, decode_map, check_map);
    case 5: return batch_of(bytes, tensors);
    case 7: return manifest(bytes);
    case 8: return twice(bytes, decode_image, check_image);
    case 9:
      return twice(bytes, decode_move, [](const MoveRequest& move) {
        require(check_name(move.name).ok() && !move.to.empty() && move.number != 0);
      });
    case 10:
      return twice(bytes, decode_listed, [](const std::vector<ListedPart>& parts) {
        std::vector<OwnedPart> owned;
        for (const ListedPart& part : parts) {
          require(check_name(part.name).ok());
          owned.push_back({part.index % 2 == 0 ? "a" : "b", part});
        }
        require(share_of("c", owned).size() <= parts.size());
      });
    case 11: return servers(bytes);
    case 12:
      return twice(bytes, decode_share, [](const ShareRequest& request) {
        require(check_name(request.name).ok());
        require(share_socket_name(request.socket).size() == 11 + 2 * kShareToken);
      });
    case 13:
      return twice(bytes, decode_shared, [](const std::vector<SharedParameter>& parameters) {
        const auto layout = layout_of(parameters);
        require(!layout.ok() || layout->offsets.size() == parameters.size());
        for (size_t i = 0; layout.ok() && i < parameters.size(); ++i) {
          require(layout->offsets[i] + parameters[i].bytes() <= layout->total);
        }
        require(difference(parameters, parameters).empty());
      });
    default:
      return twice(
          bytes,
          [&](std::string_view b) { return decode_results(b, std::vector<at::Tensor>(tensors)); },
          [&](const Results& results) {
            size_t dealt = 0;
            for (const auto& [said, more] : results) {
              dealt += said.ok() ? said->tensors.size() : 0;
              if (more == 0) continue;
              require(said.ok() && said->tensors.empty());
              require(answer_after(said->answer, more).version >= more);
            }
            require(dealt == tensors);
          });
  }
}
