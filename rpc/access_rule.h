#ifndef WEFT_RPC_ACCESS_RULE_H_
#define WEFT_RPC_ACCESS_RULE_H_

// AccessRule: which workers may call which methods of ours, given at join:
//
//   auto worker = weft::join({.library = library(),
//                             .access = {{"app.save", {"trainer0"}},
//                                        {"app.Table*", {"trainer*", "eval*"}}}});
//
// A method that no rule names may be called by every worker of the job. One that some rule names
// may be called by those that one of its rules lists, and by its own worker. A call of another
// worker does not run: it gets an error of kind permission that names method, caller and callee.
//
// Callers are names of workers; they are proved by certificates (transport/credentials.h) and mere
// words without. Methods are named as in Library: "app.forward", "app.Table" (its constructors),
// "app.Table.lookup", "aten::add.Tensor", "@rref.fetch" of a service. In both a '*' stands for any
// characters, but for a service's '@', which must be written. A rule that names no method that
// there is, is an error of join.

#include <string>
#include <vector>

namespace weft {

struct AccessRule {
  std::string methods{};
  std::vector<std::string> callers{};  // names of workers; see above
};

}  // namespace weft

#endif  // WEFT_RPC_ACCESS_RULE_H_
