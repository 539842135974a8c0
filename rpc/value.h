#ifndef WEFT_RPC_VALUE_H_
#define WEFT_RPC_VALUE_H_

// What travels: Codec with its Encoder and Decoder (codec.h), and the standard library's containers (containers.h).

#include "weft/rpc/codec.h"
#include "weft/rpc/containers.h"

#endif  // WEFT_RPC_VALUE_H_
