// Certificates for the rows over TLS: one for all ranks, in files that last as long as the run.
#ifndef WEFT_BENCH_RPC_CREDENTIALS_H_
#define WEFT_BENCH_RPC_CREDENTIALS_H_

#include <string>

namespace weft::bench {

// Writes ca.pem, bench.pem and bench.key into the new folder `directory`. Throws.
void make_credentials(const std::string& directory);

}  // namespace weft::bench

#endif  // WEFT_BENCH_RPC_CREDENTIALS_H_
