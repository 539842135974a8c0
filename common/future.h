#ifndef WEFT_COMMON_FUTURE_H_
#define WEFT_COMMON_FUTURE_H_

// Futures: Promise<T> and Future<T> (promise.h), and one future for several (future_group.h).

#include "weft/common/future_group.h"
#include "weft/common/promise.h"

#endif  // WEFT_COMMON_FUTURE_H_
