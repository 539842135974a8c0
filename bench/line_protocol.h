// The line protocol that bench/run.py speaks with every C++ driver.
//
// A driver is started once per rank, with --rank 0 (the caller), --rank 1 (the callee) and so on,
// and says {"ready": true} once all are connected. The caller then answers each command line on
// stdin with one line of JSON on stdout:
//
//   lat NAME COUNT                  COUNT calls, each timed singly    {"us": [...]}
//   flight DEPTH COUNT              issue DEPTH, wait for all, repeat {"rate": calls per second}
//   slide DEPTH COUNT               DEPTH in flight at every moment   {"rate": calls per second}
//   echo BYTES COUNT                a payload there and back          {"ms": [...], "first_ms": x}
//   silence NAME COUNT SECONDS OFFSET
//                                   one call after each silence       {"us": [...]}
//   flow NAME COUNT BYTES           `lat` beside messages of BYTES that go to the same peer back to
//                                   back                              {"us": [...], "flow": GiB/s}
//   quit                            leave                             {"bye": true}
//
// A driver has those whose operations it sets, and may have commands of its own (Operations::more).
// What a driver cannot do is answered {"error": "..."}. End of input means quit, so no driver
// outlives the program that started it. Raw samples travel, never percentiles: rounds are pooled by
// the reader.
//
// Threading: everything here belongs to the thread that runs serve().
#ifndef WEFT_BENCH_LINE_PROTOCOL_H_
#define WEFT_BENCH_LINE_PROTOCOL_H_

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace weft::bench {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// What one driver must be able to do; `call` is synchronous and throws std::exception on failure.
struct Operations {
  std::function<std::function<void()>(std::string_view name)> call;  // throws for an unknown name
  std::function<void(int depth, int64_t count)> flight;
  std::function<void(int depth, int64_t count)> slide;
  std::function<std::function<void()>(int64_t bytes)> echo;  // the returned function does one echo
  // Begins to send messages of so many bytes, one after another; the returned function ends that
  // and tells how many bytes arrived meanwhile.
  std::function<std::function<int64_t()>(int64_t bytes)> flow;
  // Commands of one driver: from the rest of the line to the answer.
  std::map<std::string, std::function<std::string(std::istream&)>> more;
};

// Calls before the timed ones of `lat`, as the peers' published drivers have them.
inline constexpr int kWarmUpCalls = 300;
inline constexpr int kFewWarmUps = 5;

inline std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += ' ';
    } else {
      out += c;
    }
  }
  return out + "\"";
}

inline std::string json_array(const std::vector<double>& values) {
  std::string out = "[";
  char buffer[32];
  for (size_t i = 0; i < values.size(); ++i) {
    std::snprintf(buffer, sizeof buffer, "%s%.3f", i ? "," : "", values[i]);
    out += buffer;
  }
  return out + "]";
}

inline double timed(const std::function<void()>& call) {
  const auto start = Clock::now();
  call();
  return seconds_since(start);
}

inline std::vector<double> latencies(const Operations& operations, const std::string& name,
                                     int64_t count) {
  const auto call = operations.call(name);
  for (int i = 0; i < kWarmUpCalls; ++i) call();
  std::vector<double> us(static_cast<size_t>(count));
  for (double& sample : us) sample = timed(call) * 1e6;
  return us;
}

inline std::string run_latency(const Operations& operations, std::istream& in) {
  std::string name;
  int64_t count = 0;
  if (!(in >> name >> count) || count < 1) throw std::invalid_argument("lat NAME COUNT");
  return "{\"us\":" + json_array(latencies(operations, name, count)) + "}";
}

// As `lat`, with kFewWarmUps calls before, for calls that take long: a driver has it as `few` among its more.
inline std::string run_few(const Operations& operations, std::istream& in) {
  std::string name;
  int64_t count = 0;
  if (!(in >> name >> count) || count < 1) throw std::invalid_argument("few NAME COUNT");
  const auto call = operations.call(name);
  for (int i = 0; i < kFewWarmUps; ++i) call();
  std::vector<double> us(static_cast<size_t>(count));
  for (double& sample : us) sample = timed(call) * 1e6;
  return "{\"us\":" + json_array(us) + "}";
}

inline std::string run_flow(const Operations& operations, std::istream& in) {
  std::string name;
  int64_t count = 0;
  int64_t bytes = 0;
  if (!(in >> name >> count >> bytes) || count < 1 || bytes < 1) {
    throw std::invalid_argument("flow NAME COUNT BYTES");
  }
  if (operations.flow == nullptr) throw std::invalid_argument("this driver sends no flow");
  const auto end = operations.flow(bytes);
  const auto start = Clock::now();
  const std::vector<double> us = latencies(operations, name, count);
  const double seconds = seconds_since(start);
  std::ostringstream out;
  out << "{\"flow\":" << static_cast<double>(end()) / (1 << 30) / seconds
      << ",\"us\":" << json_array(us) << "}";
  return out.str();
}

inline std::string run_rate(const std::function<void(int, int64_t)>& run, std::istream& in) {
  if (run == nullptr) throw std::invalid_argument("this driver has no calls in flight");
  int depth = 0;
  int64_t count = 0;
  if (!(in >> depth >> count) || depth < 1 || count < depth) {
    throw std::invalid_argument("flight|slide DEPTH COUNT");
  }
  run(depth, depth * 5);
  const auto start = Clock::now();
  run(depth, count);
  std::ostringstream out;
  out << "{\"rate\":" << static_cast<double>(count) / seconds_since(start) << "}";
  return out.str();
}

inline std::string run_echo(const Operations& operations, std::istream& in) {
  if (operations.echo == nullptr) throw std::invalid_argument("this driver has no echo");
  int64_t bytes = 0;
  int64_t count = 0;
  if (!(in >> bytes >> count) || bytes < 1 || count < 1) {
    throw std::invalid_argument("echo BYTES COUNT");
  }
  const auto call = operations.echo(bytes);
  const double first = timed(call) * 1e3;
  std::vector<double> ms(static_cast<size_t>(count));
  for (double& sample : ms) sample = timed(call) * 1e3;
  std::ostringstream out;
  out << "{\"first_ms\":" << first << ",\"ms\":" << json_array(ms) << "}";
  return out.str();
}

inline void sleep_for_seconds(double seconds) {
  timespec left{};
  left.tv_sec = static_cast<time_t>(seconds);
  left.tv_nsec = static_cast<long>((seconds - static_cast<double>(left.tv_sec)) * 1e9);
  while (nanosleep(&left, &left) != 0) {
  }
}

// The silence is the subject of the measurement here, not a way to wait for something.
inline std::string run_silence(const Operations& operations, std::istream& in) {
  std::string name;
  int64_t count = 0;
  double seconds = 0;
  double offset = 0;
  if (!(in >> name >> count >> seconds >> offset) || count < 1) {
    throw std::invalid_argument("silence NAME COUNT SECONDS OFFSET");
  }
  const auto call = operations.call(name);
  for (int i = 0; i < kWarmUpCalls; ++i) call();
  sleep_for_seconds(offset);
  std::vector<double> us(static_cast<size_t>(count));
  for (double& sample : us) {
    sleep_for_seconds(seconds);
    sample = timed(call) * 1e6;
  }
  return "{\"us\":" + json_array(us) + "}";
}

// Memory that a virtual machine has never used costs several times more at its first touch.
inline void touch_memory(int64_t mib) {
  if (mib <= 0) return;
  const size_t bytes = static_cast<size_t>(mib) << 20;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("cannot map " + std::to_string(mib) + " MiB");
  for (size_t i = 0; i < bytes; i += 4096) static_cast<volatile char*>(memory)[i] = 1;
  munmap(memory, bytes);
}

inline std::string answer(const Operations& operations, const std::string& line) {
  std::istringstream in(line);
  std::string command;
  in >> command;
  try {
    if (command == "lat") return run_latency(operations, in);
    if (command == "flight") return run_rate(operations.flight, in);
    if (command == "slide") return run_rate(operations.slide, in);
    if (command == "echo") return run_echo(operations, in);
    if (command == "silence") return run_silence(operations, in);
    if (command == "flow") return run_flow(operations, in);
    const auto more = operations.more.find(command);
    if (more != operations.more.end()) return more->second(in);
    throw std::invalid_argument("unknown command: " + command);
  } catch (const std::exception& error) {
    return "{\"error\":" + quoted(error.what()) + "}";
  }
}

inline void say(const std::string& line) {
  std::fputs((line + "\n").c_str(), stdout);
  std::fflush(stdout);
}

inline constexpr char kReady[] = "{\"ready\":true}";

// Answers commands until `quit` or the end of input. A callee passes no operations and waits for
// that end alone.
inline void serve(const Operations* operations = nullptr) {
  say(kReady);
  std::string line;
  while (std::getline(std::cin, line) && line != "quit") {
    say(operations == nullptr ? "{\"error\":\"the callee makes no calls\"}"
                              : answer(*operations, line));
  }
}

// --name value pairs; every driver knows --rank, --port, --mode, --path (for
// a Unix socket) and --touch (MiB of memory to write to before the start).
inline std::string option(int argc, char** argv, std::string_view name,
                          const std::string& otherwise) {
  for (int i = 1; i + 1 < argc; i += 2) {
    if (argv[i] == name) return argv[i + 1];
  }
  return otherwise;
}

// The main of a driver: what run() throws is its last line of log.
inline int driver_main(const char* name, int (*run)(int argc, char** argv), int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
    return 1;
  }
}

// The run() of a driver whose two ranks have nothing in common; `caller` serves, `callee` answers
// until the caller has left.
template <class Caller, class Callee>
int run_pair(int argc, char** argv, const Caller& caller, const Callee& callee) {
  touch_memory(std::stoll(option(argc, argv, "--touch", "0")));
  if (option(argc, argv, "--rank", "0") == "0") {
    caller();
  } else {
    callee();
  }
  say("{\"bye\":true}");
  return 0;
}

}  // namespace weft::bench

#endif  // WEFT_BENCH_LINE_PROTOCOL_H_
