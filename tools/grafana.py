"""Writes docs/grafana.json, a Grafana dashboard over the metrics of a job's workers.

usage: grafana.py           writes it
       grafana.py --check   fails when the file is another one, or asks for a metric that no source has
"""
import argparse
import json
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts", "docs"))
import tables  # noqa: E402

FILE = os.path.join(ROOT, "docs", "grafana.json")
# (title, unit, [(expression, legend)]); $rate stands for [$__rate_interval], by instance unless it says otherwise.
ROWS = (
    ("Calls", (
        ("Calls per second", "reqps", (("sum by (instance) (rate(weft_rpc_calls_issued_total$rate))", "{{instance}}"),)),
        ("Calls that failed", "reqps", (("sum by (instance) (rate(weft_rpc_calls_failed_total$rate))", "{{instance}}"),)),
        ("Time of a call", "s", (
            ("histogram_quantile(0.5, sum by (le) (rate(weft_rpc_call_seconds_bucket$rate)))", "median"),
            ("histogram_quantile(0.99, sum by (le) (rate(weft_rpc_call_seconds_bucket$rate)))", "99 %"))),
        ("Handlers", "reqps", (
            ("sum by (instance) (rate(weft_rpc_requests_inline_total$rate))", "{{instance}} on the poller"),
            ("sum by (instance) (rate(weft_rpc_requests_pooled_total$rate))", "{{instance}} on the pool"))))),
    ("Connections", (
        ("Bytes sent, by peer", "Bps", (("sum by (instance, peer) (rate(weft_rpc_lane_bytes_sent_total$rate))", "{{instance}} to {{peer}}"),)),
        ("Queueing delay of a frame that waited", "s", (
            ("sum by (instance, lane) (rate(weft_rpc_lane_queued_seconds_total$rate)) / sum by (instance, lane) "
             "(rate(weft_rpc_lane_queued_total$rate))", "{{instance}} lane {{lane}}"),)),
        ("Shared memory and the wire", "Bps", (
            ("sum by (instance) (rate(weft_rpc_arena_hit_bytes_total$rate))", "{{instance}} shared"),
            ("sum by (instance) (rate(weft_rpc_arena_fallback_bytes_total$rate))", "{{instance}} by the wire"))),
        ("Connections lost, requests sent again", "cps", (
            ("sum by (instance) (rate(weft_rpc_connections_lost_total$rate))", "{{instance}} lost"),
            ("sum by (instance) (rate(weft_rpc_calls_resent_total$rate))", "{{instance}} sent again"))),
        ("Descriptors in use", "percentunit", (("weft_rpc_descriptors_open / weft_rpc_descriptors_limit", "{{instance}}"),)))),
    ("Process groups", (
        ("Operations per second", "ops", (("sum by (op) (rate(weft_collectives_operations_total$rate))", "{{op}}"),)),
        ("Time of an operation, 99 %", "s", (
            ("histogram_quantile(0.99, sum by (le, op) (rate(weft_collectives_operation_seconds_bucket$rate)))", "{{op}}"),)),
        ("Bytes of tensors", "Bps", (("sum by (op) (rate(weft_collectives_tensor_bytes_total$rate))", "{{op}}"),)),
        ("Operations and groups that failed", "cps", (
            ("sum by (op) (rate(weft_collectives_errors_total$rate))", "{{op}}"),
            ("sum by (instance) (rate(weft_collectives_group_failures_total$rate))", "groups of {{instance}}"))))),
    ("Parameter tables", (
        ("Pushes and pulls per second", "ops", (
            ("sum by (instance) (rate(weft_ps_pushes_total$rate))", "{{instance}} pushes"),
            ("sum by (instance) (rate(weft_ps_pulls_total$rate))", "{{instance}} pulls"))),
        ("Pulls that wait", "short", (("sum by (instance) (weft_ps_waiting_pulls)", "{{instance}}"),)),
        ("Bytes", "bytes", (
            ("sum by (instance) (weft_ps_table_bytes)", "{{instance}} tables"),
            ("sum by (instance) (weft_ps_held_bytes)", "{{instance}} pushes that wait"),
            ("sum by (instance) (weft_ps_log_bytes)", "{{instance}} not confirmed by backups"))),
        ("Steps behind, 99 %", "short", (
            ("histogram_quantile(0.99, sum by (le) (rate(weft_ps_lag_steps_bucket$rate)))", "of a pull"),)))))


def panel(number, title, unit, targets, x, y):
    source = {"type": "prometheus", "uid": "${source}"}
    return {"id": number, "type": "timeseries", "title": title, "datasource": source, "gridPos": {"x": x, "y": y, "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [{"refId": chr(ord("A") + i), "datasource": source, "legendFormat": legend,
                         "expr": re.sub(r"(weft_\w+)", r'\1{job="$job"}', expression).replace("$rate", "[$__rate_interval]")}
                        for i, (expression, legend) in enumerate(targets)]}


def dashboard():
    panels, number, y = [], 1, 0
    for heading, rows in ROWS:
        panels.append({"id": number, "type": "row", "title": heading, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        number, y = number + 1, y + 1
        for i, (title, unit, targets) in enumerate(rows):
            panels.append(panel(number, title, unit, targets, 12 * (i % 2), y))
            number += 1
            y += 8 if i % 2 or i == len(rows) - 1 else 0
    variables = [{"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
                 {"name": "job", "label": "Job", "type": "query", "datasource": {"type": "prometheus", "uid": "${source}"},
                  "query": {"query": "label_values(weft_rpc_calls_issued_total, job)", "refId": "jobs"}, "refresh": 2}]
    return {"title": "weft", "uid": "weft", "tags": ["weft"], "schemaVersion": 39, "version": 1, "refresh": "10s", "editable": True,
            "time": {"from": "now-30m", "to": "now"}, "templating": {"list": variables}, "panels": panels}


def known_metrics():
    names = {name for name, *_ in tables.metrics(ROOT)} | {"weft_rpc_descriptors_open", "weft_rpc_descriptors_limit"}
    numbers = re.findall(r'\{"(\w+)", lane\.\w+\}', tables.read(ROOT, "transport/connection_stats.cc"))
    names |= {"weft_rpc_lane_" + ("queued_seconds" if name == "queued_us" else name) + "_total" for name in numbers}
    stats = tables.read(ROOT, "rpc/internal/agent/agent_stats.cc")
    names |= {f"weft_rpc_{name}_total" for name in re.findall(r'\badd\("(\w+)"', stats)}
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = json.dumps(dashboard(), indent=1) + "\n"
    known = known_metrics()
    wrong = sorted({name for name in re.findall(r"weft_\w+", text) if re.sub(r"_(bucket|sum|count)$", "", name) not in known})
    for name in wrong:
        print(f"grafana: no source has the metric {name}")
    if args.check:
        with open(FILE, encoding="utf-8") as file:
            if file.read() != text:
                print("grafana: docs/grafana.json is another one; run tools/grafana.py")
                wrong.append(FILE)
    else:
        with open(FILE, "w", encoding="utf-8") as file:
            file.write(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
