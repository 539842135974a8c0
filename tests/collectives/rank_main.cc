// One rank of a group as a process, for tests: collectives_rank STORE RANK SIZE BACKEND [FILE]. It
// does what it is told on its standard input, a line each, and answers in lines. FILE: for flight
// records, at SIGUSR1. WEFT_LISTEN: where to listen, instead of loopback.
//
//   loop ELEMENTS MILLISECONDS   all_reduce again and again; "going" after the first, then what
//                                ends it: "error KIND MESSAGE"
//   sum ELEMENTS                 one all_reduce of ones; "sum VALUE" or "error KIND MESSAGE"
//   time ELEMENTS TIMES KIND     the median of so many all_reduces of plain memory, or with KIND
//                                "empty" of the group's: "took MICROSECONDS"
//   rebuild MILLISECONDS         "rebuilt GENERATION SIZE OLD,RANKS" or "error KIND MESSAGE"
//   quit
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/ops/ones.h"
#include "weft/collectives/flight_recorder.h"
#include "weft/collectives/process_group.h"

namespace {

void say(const std::string& line) { std::cout << line << std::endl; }

void say_error(const weft::Status& s) {
  say("error " + std::string(weft::kind_name(weft::error_kind(s))) + " " +
      std::string(s.message().data(), s.message().size()));
}

int run(int argc, char** argv) {
  weft::ProcessGroupOptions options;
  if (argc == 6) {
    options.flight_recorder = weft::make_flight_recorder({.file = argv[5], .signal = SIGUSR1});
  }
  options.rendezvous = argv[1];
  options.rank = std::stoi(argv[2]);
  options.size = std::stoi(argv[3]);
  const std::string backend = argv[4];
  options.backend = backend == "tcp"   ? weft::Backend::kTcp
                    : backend == "shm" ? weft::Backend::kShm
                                       : weft::Backend::kAuto;
  if (backend == "shm+tcp") options.host = *options.rank % 2 == 0 ? "even" : "odd";
  options.init_timeout = absl::Seconds(60);
  if (const char* const address = std::getenv("WEFT_LISTEN"); address != nullptr) {
    options.listen_address = address;
    options.allow_insecure = true;
  }
  weft::ProcessGroup group = weft::init_process_group(options);
  say("made " + std::string(group.backend()));
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    std::string what;
    int64_t elements = 0;
    in >> what >> elements;
    const at::Tensor t = at::ones({elements});
    if (what == "quit") return 0;
    if (what == "rebuild") {
      weft::StatusOr<weft::ProcessGroup> next =
          group.try_rebuild({.timeout = absl::Milliseconds(elements)});
      if (!next.ok()) {
        say_error(next.status());
        continue;
      }
      group = *std::move(next);
      std::string ranks;
      for (const int rank : group.previous_ranks()) {
        ranks += (ranks.empty() ? "" : ",") + std::to_string(rank);
      }
      say("rebuilt " + std::to_string(group.generation()) + " " + std::to_string(group.size()) +
          " " + ranks);
      continue;
    }
    if (what == "sum") {
      const weft::Status s = group.try_all_reduce(t);
      if (s.ok()) {
        say("sum " + std::to_string(t[elements - 1].item<double>()));
      } else {
        say_error(s);
      }
    }
    if (what == "time") {
      int64_t times = 0;
      std::string kind;
      in >> times >> kind;
      at::Tensor tensor = kind == "empty" ? group.empty({elements}) : t.clone();
      tensor.fill_(1);
      std::vector<double> took;
      for (int64_t i = 0; i < times + 3; ++i) {
        const absl::Time begin = group.runtime()->now();
        weft::throw_if_error(group.try_all_reduce(tensor, {.op = weft::ReduceOp::kMax}));
        if (i >= 3) took.push_back(absl::ToDoubleMicroseconds(group.runtime()->now() - begin));
      }
      std::sort(took.begin(), took.end());
      say("took " + std::to_string(took[took.size() / 2]));
    }
    if (what == "loop") {
      int64_t milliseconds = 0;
      in >> milliseconds;
      weft::Status s = group.try_all_reduce(t, {.op = weft::ReduceOp::kMax});
      say("going");
      while (s.ok()) {
        s = group.try_all_reduce(
            t, {.op = weft::ReduceOp::kMax, .timeout = absl::Milliseconds(milliseconds)});
      }
      say_error(s);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6) return 2;
  at::set_num_threads(1);
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    say(std::string("error thrown ") + e.what());
    return 1;
  }
}
