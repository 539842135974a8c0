#ifndef WEFT_EXAMPLES_ASYNC_PS_TRAINER_H_
#define WEFT_EXAMPLES_ASYNC_PS_TRAINER_H_

// A trainer's work, from its first call to its last: run_trainer(worker). Throws weft::Error when
// the server cannot be reached or refuses. One thread.

#include "weft/rpc/worker.h"

namespace async_ps {

void run_trainer(const weft::Worker& worker);
// The same with --mode autograd.
void run_split_trainer(const weft::Worker& worker);

}  // namespace async_ps

#endif  // WEFT_EXAMPLES_ASYNC_PS_TRAINER_H_
