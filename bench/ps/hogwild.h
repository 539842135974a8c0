#ifndef WEFT_BENCH_PS_HOGWILD_H_
#define WEFT_BENCH_PS_HOGWILD_H_

// The row of the suite with two threads that update parameters in place. `hogwild WORK TABLES COUNT`, with TABLES 1: both
// threads have one table, 2: each has its own. WORK:
//
//   steps   training steps of a classifier (64 inputs, 64 hidden units, 10 outputs, batches of 32), SGD
//   rows    updates of 1,024 rows of 100,000 x 64, keys drawn evenly, SGD
//   dense   updates of all of 1 MiB
//
// {"rate": updates/s, of both together}. Threads: the one that serves the commands.

#include <istream>
#include <string>

namespace weft::bench {

std::string hogwild(std::istream& in);

}  // namespace weft::bench

#endif  // WEFT_BENCH_PS_HOGWILD_H_
