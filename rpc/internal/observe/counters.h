#ifndef WEFT_RPC_INTERNAL_OBSERVE_COUNTERS_H_
#define WEFT_RPC_INTERNAL_OBSERVE_COUNTERS_H_

// The agent's counters: plain atomics, read by debug_info() and exported as metrics.

#include "weft/common/metrics.h"
#include "weft/rpc/internal/agent/agent.h"

namespace weft::internal {

// NOLINTNEXTLINE(readability-identifier-naming): declared in agent.h
struct Agent::Counters {
  explicit Counters(Metrics* m)
      : issued(m->counter("weft_rpc_calls_issued_total", "Calls begun here")),
        completed(
            m->counter("weft_rpc_calls_completed_total", "Calls begun here that are complete")),
        failed(
            m->counter("weft_rpc_calls_failed_total", "Calls begun here that ended with an error")),
        served(m->counter("weft_rpc_requests_served_total", "Handlers that have replied")),
        inline_runs(m->counter("weft_rpc_requests_inline_total", "Handlers run on the poller")),
        pool_posts(m->counter("weft_rpc_requests_pooled_total", "Handlers handed to the pool")),
        late_answers(
            m->counter("weft_rpc_answers_late_total", "Answers to calls that were complete")),
        foreign_answers(m->counter("weft_rpc_answers_foreign_total",
                                   "Answers dropped, since the call was to another worker")),
        unsent_answers(m->counter("weft_rpc_answers_unsent_total",
                                  "Answers whose connection was lost before they left")),
        retried(m->counter("weft_rpc_calls_resent_total", "Requests sent again")),
        duplicates(m->counter("weft_rpc_requests_repeated_total",
                              "Requests that had arrived before and were not run again")),
        given_up(m->counter("weft_rpc_requests_given_up_total",
                            "Requests whose deadline or cancellation came before their handler")),
        dials(m->counter("weft_rpc_dials_total", "Connections asked for")),
        connects(m->counter("weft_rpc_connections_total", "Connections opened, by either side")),
        reconnects(m->counter("weft_rpc_reconnects_total",
                              "Connections opened to a peer that had one before")),
        lost(m->counter("weft_rpc_connections_lost_total", "Connections that broke")),
        violations(
            m->counter("weft_rpc_protocol_errors_total", "Connections closed for odd bytes")),
        call_seconds(m->histogram("weft_rpc_call_seconds", "Time from issue to completion")) {}

  Counter* const issued;
  Counter* const completed;
  Counter* const failed;
  Counter* const served;
  Counter* const inline_runs;
  Counter* const pool_posts;
  Counter* const late_answers;
  Counter* const foreign_answers;
  Counter* const unsent_answers;
  Counter* const retried;
  Counter* const duplicates;
  Counter* const given_up;
  Counter* const dials;
  Counter* const connects;
  Counter* const reconnects;
  Counter* const lost;
  Counter* const violations;
  Histogram* const call_seconds;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_OBSERVE_COUNTERS_H_
