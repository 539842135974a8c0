#ifndef WEFT_RPC_INTERNAL_DEVICE_DEVICES_H_
#define WEFT_RPC_INTERNAL_DEVICE_DEVICES_H_

// Devices as numbers (proto/rpc.proto, DeviceRecord), what members tell each other about theirs,
// and what is wrong with a device map.
//
//   DEV-1  a map is one to one, so that results have one way back.
//   DEV-2  both ends of a map are devices that their workers have and use: ours is checked before
//          other workers learn of us, the other end as soon as its worker is a member.
//
// Value types and free functions; any thread.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "c10/core/Device.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/rpc/device_map.h"
#include "weft/rpc/spi/device_code.h"

namespace weft::internal {

struct MemberList;

// {the sender's device, the receiver's}.
using DevicePairs = std::vector<std::pair<DeviceCode, DeviceCode>>;
// "{cuda:0 -> cuda:1, cuda:1 -> cuda:0}".
WEFT_API std::string pairs_text(const DevicePairs& pairs);

// The way of a message's tensors.
struct DeviceRoute {
  std::string to;     // the receiver's name
  DevicePairs pairs;  // of the workers that have a map
  std::string wrong;  // not "": why the map cannot be used
};
// Where a tensor on `from` belongs. Error, kind invalid_argument: nothing says so; `route` is null
// for workers without maps.
WEFT_API StatusOr<DeviceCode> target_device(const DeviceRoute* route, c10::Device from);

// What a worker tells the others of its devices.
struct MemberDevices {
  int count = 0;
  std::vector<DeviceCode> used;  // sorted; empty: it did not say
  std::map<std::string, DevicePairs> maps;
};

// The two options of join, without a look at any device: everything that is wrong, one text each.
WEFT_API std::vector<std::string> check_device_options(const std::map<std::string, DeviceMap>& maps,
                                                       const std::vector<c10::Device>& devices);
// REQUIRES: check_device_options() found nothing. An error of kind invalid_argument names every
// device that is not among the `count` of this worker.
WEFT_API StatusOr<MemberDevices> make_member_devices(const std::map<std::string, DeviceMap>& maps,
                                                     const std::vector<c10::Device>& devices,
                                                     int count);

// Besides the CPU: those it named, else those of its maps. Each once.
std::vector<c10::Device> devices_in_use(const MemberDevices& devices);

// What is wrong with the map of `owner` for `to`, given what `to` told (null: nothing); "" when it
// is right.
WEFT_API std::string check_device_map(std::string_view owner, std::string_view to,
                                      const DevicePairs& pairs, const MemberDevices* target);
// The maps of `owner` (all members' when null) against the members that are there. `complete`: a
// name that is not there is wrong, too. Kind invalid_argument, with everything that is wrong.
Status check_device_maps(const MemberList& members, const std::string* owner, bool complete);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_DEVICE_DEVICES_H_
