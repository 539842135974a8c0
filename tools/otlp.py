#!/usr/bin/env python3
"""Turns the timelines of a job into OTLP JSON, which OpenTelemetry's collector, Jaeger and Grafana Tempo read.

usage: tools/otlp.py FILE... [--job ID] [--out FILE]

FILE... are what WEFT_TRACE_FILE='trace.%r.json' made the workers of one job write. Each call is two spans, of its caller
(CLIENT) and of its callee (SERVER), whose parent the first is. A call that a handler makes while it runs has the handler's span for
its parent, so a chain of calls over workers is one trace. Backwards and operations of process groups are spans, too, each a trace
of its own. Trace ids have 128 bits; the same files give the same ids.

--job ID     stands in the ids and as an attribute of every worker (default: made from the files)
--out FILE   default: standard output. curl -H 'Content-Type: application/json' -d @FILE http://collector:4318/v1/traces sends it
"""
import argparse
import bisect
import collections
import hashlib
import json
import sys

MASK = (1 << 64) - 1
FACTOR = 0x9E3779B97F4A7C15     # of rpc/internal/agent/call_trace.h: the id of both ends is incarnation + call * FACTOR
INVERSE = pow(FACTOR, -1, 1 << 64)
INTERNAL, SERVER, CLIENT = 1, 2, 3
ERROR = 2


class Worker:
    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        if "weft_calendar_offset_us" not in data.get("otherData", {}):
            raise ValueError(f"{path} is no timeline of weft")
        self.rank = int(data["otherData"]["weft_rank"])
        self.name = f"rank {self.rank}"
        # Integers: in a double the calendar leaves a quarter of a microsecond.
        self.offset = nanos(data["otherData"]["weft_calendar_offset_us"])
        self.events = data["traceEvents"]
        for event in self.events:
            if event["ph"] == "M" and event["name"] == "process_name":
                self.name = event["args"]["name"]

    def time(self, event, key="ts"):
        return nanos(event[key]) + (self.offset if key == "ts" else 0)


def nanos(micros):
    """Microseconds with up to three decimals, as text or as the number that was read from it."""
    return round(float(micros) * 1000) if not isinstance(micros, str) else int(micros.replace(".", ""))


class Span:
    def __init__(self, worker, kind, name, begin, key):
        self.worker, self.kind, self.name, self.begin = worker, kind, name, begin
        self.key = key          # tells it from every other span of the job
        self.end = begin
        self.tid = 0
        self.attributes = {}
        self.error = None
        self.parent = None
        self.ids = None         # (trace, span, parent) of a trace that came with the call


def incarnation_of(calls, flows):
    """Of a worker: the number that leads from the ids of its calls to those of their arrows; None without arrows."""
    known = {int(event["id"], 16) for event in calls}
    for flow in flows[:1]:
        for event in calls:
            if event["name"] != flow["name"]:
                continue
            candidate = (int(flow["id"], 16) - int(event["id"], 16) * FACTOR) & MASK
            if all((int(other["id"], 16) - candidate) * INVERSE & MASK in known for other in flows):
                return candidate
    return None


def spans_of(worker):
    """The spans of one worker, with {id of both ends: span} of its calls and of those that it serves."""
    open_spans, spans, calls, served, ran = {}, [], {}, {}, []
    rpc = [event for event in worker.events if event["ph"] == "b" and event["cat"] == "rpc"]
    incarnation = incarnation_of(rpc, [event for event in worker.events if event["ph"] == "s" and event["cat"] == "rpc"])
    for event in worker.events:
        category = event.get("cat")
        if event["ph"] == "b" and category in ("rpc", "serve", "backward"):
            number = int(event["id"], 16)
            both = number if category != "rpc" else None if incarnation is None else (incarnation + number * FACTOR) & MASK
            kind = {"rpc": CLIENT, "serve": SERVER}.get(category, INTERNAL)
            span = Span(worker, kind, event["name"], worker.time(event), (category, worker.rank if both is None else "", both or number))
            if category == "backward":
                span.key = (category, worker.rank, number)
            span.tid = event["tid"]
            span.attributes = dict(event.get("args", {}))
            ids = [span.attributes.pop(key, None) for key in ("trace", "span", "parent")]
            span.ids = ids if None not in ids else None
            open_spans[(category, event["id"], event["name"])] = span
            spans.append(span)
            if both is not None and category != "backward":
                (calls if category == "rpc" else served)[both] = span
        elif event["ph"] == "e" and (category, event["id"], event["name"]) in open_spans:
            span = open_spans.pop((category, event["id"], event["name"]))
            span.end = worker.time(event)
            arguments = dict(event.get("args", {}))
            span.error = arguments.pop("error", None)
            span.attributes.update(arguments)
        elif event["ph"] == "X" and category == "collectives":
            span = Span(worker, INTERNAL, event["name"], worker.time(event), ("collectives", worker.rank, len(spans)))
            span.end = span.begin + worker.time(event, "dur")
            span.attributes = dict(event.get("args", {}))
            span.error = span.attributes.pop("error", None) or None
            spans.append(span)
        elif event["ph"] == "X" and category == "run":
            ran.append((event["tid"], worker.time(event), worker.time(event) + worker.time(event, "dur"), event["name"]))
    # A call that is still open had not ended when the worker left.
    for span in open_spans.values():
        span.end = max(span.begin, max((worker.time(event) for event in worker.events if "ts" in event), default=span.begin))
        span.error = "not ended when the worker left"
    link_runs(worker, spans, served, ran)
    return spans, calls, served


def link_runs(worker, spans, served, ran):
    """A call that a handler made on its thread, between the ends of its run, has the handler's span for its parent."""
    arrows = collections.defaultdict(list)
    for event in worker.events:
        if event["ph"] == "f" and event.get("cat") == "rpc":
            arrows[event["tid"]].append((worker.time(event), int(event["id"], 16)))
    runs = collections.defaultdict(list)
    for tid, begin, end, _ in ran:
        inside = [both for at, both in arrows[tid] if begin <= at <= end]
        if inside and inside[0] in served:
            runs[tid].append((begin, end, served[inside[0]]))
    for found in runs.values():
        found.sort(key=lambda run: run[0])
    for span in spans:
        if span.kind != CLIENT:
            continue
        found = runs[span.tid]
        at = bisect.bisect_right([run[0] for run in found], span.begin) - 1
        # Runs may lie in one another: the innermost one that has not ended.
        while at >= 0 and found[at][1] < span.begin:
            at -= 1
        if at >= 0:
            span.parent = found[at][2]


def digest(size, *parts):
    out = hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:2 * size]
    return out if int(out, 16) else "1".zfill(2 * size)


def span_id(span, job):
    return span.ids[1] if span.ids else digest(8, job, *span.key)


def trace_of(span, job):
    if span.ids:
        return span.ids[0]
    root, seen = span, {id(span)}
    while root.parent is not None and id(root.parent) not in seen:
        root = root.parent
        seen.add(id(root))
    if root.ids:
        return root.ids[0]
    return digest(16, job, *root.key)


def attribute(key, value):
    if isinstance(value, bool):
        return {"key": key, "value": {"boolValue": value}}
    if isinstance(value, int):
        return {"key": key, "value": {"intValue": str(value)}}
    if isinstance(value, float):
        return {"key": key, "value": {"doubleValue": value}}
    return {"key": key, "value": {"stringValue": str(value)}}


def otlp_span(span, job):
    out = {"traceId": trace_of(span, job), "spanId": span_id(span, job), "name": span.name, "kind": span.kind,
           "startTimeUnixNano": str(span.begin), "endTimeUnixNano": str(max(span.begin, span.end)),
           "attributes": [attribute(f"weft.{key}", value) for key, value in sorted(span.attributes.items())],
           "status": {"code": ERROR, "message": span.error} if span.error else {}}
    if span.kind in (CLIENT, SERVER):
        out["attributes"] += [attribute("rpc.system", "weft"), attribute("rpc.method", span.name)]
    if span.ids:
        out["parentSpanId"] = span.ids[2]
    elif span.parent is not None:
        out["parentSpanId"] = span_id(span.parent, job)
    return out


def convert(paths, job=None):
    workers = sorted((Worker(path) for path in paths), key=lambda worker: worker.rank)
    if job is None:
        job = digest(16, *(f"{worker.rank} {worker.name} {worker.offset}" for worker in workers))
    every = [(worker, *spans_of(worker)) for worker in workers]
    calls = {}
    for _, _, own, _ in every:
        calls.update(own)
    for _, _, _, served in every:
        for both, span in served.items():
            span.parent = calls.get(both)
    resources = []
    for worker, spans, _, _ in every:
        resources.append({
            "resource": {"attributes": [attribute("service.namespace", "weft"), attribute("service.name", worker.name),
                                        attribute("service.instance.id", f"{job}/{worker.rank}"), attribute("weft.rank", worker.rank)]},
            "scopeSpans": [{"scope": {"name": "weft"}, "spans": [otlp_span(span, job) for span in spans]}]})
    return {"resourceSpans": resources}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--job")
    parser.add_argument("--out")
    args = parser.parse_args()
    try:
        text = json.dumps(convert(args.files, args.job), ensure_ascii=False, separators=(",", ":")) + "\n"
        if args.out:
            with open(args.out, "w", encoding="utf-8") as file:
                file.write(text)
        else:
            sys.stdout.write(text)
    except (OSError, ValueError, KeyError) as error:
        print(f"otlp.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
