"""What tools/otlp.py makes of timelines: of made-up ones, and with --bin of two real workers.

usage: otlp_test.py [--bin FOLDER] [--schema]

--schema reads the result with OpenTelemetry's own messages (the Python package opentelemetry-proto); without it: exit code 77.
"""
import base64
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import otlp  # noqa: E402

A, B = 0x1111, 0xFFFF_FFFF_FFFF_0000    # incarnations


def both(incarnation, call):
    return hex((incarnation + call * otlp.FACTOR) & otlp.MASK)


def call(at, number, name, end=None, tid=1, incarnation=A, **ends):
    """The events of a call at its caller."""
    events = [{"ph": "b", "cat": "rpc", "name": name, "ts": at, "tid": tid, "id": hex(number), "args": {"to": "b", "bytes": 3}},
              {"ph": "s", "cat": "rpc", "name": name, "ts": at + 1, "tid": tid, "id": both(incarnation, number)}]
    if end is not None:
        events.append({"ph": "e", "cat": "rpc", "name": name, "ts": end, "tid": 9, "id": hex(number), "args": ends})
    return events


def served(at, identity, name, end, tid=2):
    return [{"ph": "b", "cat": "serve", "name": name, "ts": at, "tid": 1, "id": identity, "args": {"from": "a"}},
            {"ph": "f", "cat": "rpc", "name": name, "ts": at + 2, "tid": tid, "id": identity},
            {"ph": "X", "cat": "run", "name": name, "ts": at + 1, "tid": tid, "dur": end - at - 2},
            {"ph": "e", "cat": "serve", "name": name, "ts": end, "tid": tid, "id": identity}]


def convert(*workers):
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for rank, events in enumerate(workers):
            paths.append(os.path.join(folder, f"{rank}.json"))
            names = [{"ph": "M", "name": "process_name", "args": {"name": "ab"[rank]}}]
            with open(paths[-1], "w") as file:
                json.dump({"otherData": {"weft_rank": str(rank), "weft_calendar_offset_us": "1700000000000000.125"},
                           "traceEvents": names + events}, file)
        return otlp.convert(paths, "job")


def spans(document):
    return [span for resource in document["resourceSpans"] for span in resource["scopeSpans"][0]["spans"]]


def check_rules(test, document):
    """What OTLP asks of ids, times and parents."""
    found = spans(document)
    by_id = {span["spanId"]: span for span in found}
    test.assertEqual(len(by_id), len(found))
    for span in found:
        test.assertRegex(span["traceId"], r"^(?!0{32})[0-9a-f]{32}$")
        test.assertRegex(span["spanId"], r"^(?!0{16})[0-9a-f]{16}$")
        test.assertLessEqual(int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"]))
        if "parentSpanId" in span:
            test.assertEqual(by_id[span["parentSpanId"]]["traceId"], span["traceId"])
    return found


class Converted(unittest.TestCase):
    def test_a_chain_of_calls_over_two_workers_is_one_trace(self):
        # a calls b.f (1); while b runs it on thread 2 it calls a.g (1 of b); meanwhile thread 3 of b calls a.h (2 of b).
        a = call(10, 1, "b.f", 100, incarnation=A) + served(40, both(B, 1), "a.g", 60) + served(41, both(B, 2), "a.h", 50)
        b = served(20, both(A, 1), "b.f", 90) + call(30, 1, "a.g", 70, tid=2, incarnation=B) + call(31, 2, "a.h", 55, tid=3, incarnation=B)
        found = check_rules(self, convert(a, b))
        by_name = {(span["name"], span["kind"]): span for span in found}
        self.assertEqual(len(by_name), 6)
        parents = {key: next((k for k, s in by_name.items() if s["spanId"] == span.get("parentSpanId")), None) for key, span in by_name.items()}
        self.assertEqual(parents[("b.f", otlp.CLIENT)], None)
        self.assertEqual(parents[("b.f", otlp.SERVER)], ("b.f", otlp.CLIENT))
        self.assertEqual(parents[("a.g", otlp.CLIENT)], ("b.f", otlp.SERVER))
        self.assertEqual(parents[("a.g", otlp.SERVER)], ("a.g", otlp.CLIENT))
        self.assertEqual(parents[("a.h", otlp.CLIENT)], None)
        self.assertEqual(len({span["traceId"] for span in found}), 2)
        # Nanoseconds of the calendar, to the last one.
        self.assertEqual(by_name[("b.f", otlp.CLIENT)]["startTimeUnixNano"], "1700000000000010125")

    def test_the_ids_of_a_trace_that_came_with_the_call(self):
        trace, above, client, server, nested = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "1" * 16, "2" * 16, "3" * 16
        a = call(10, 1, "b.f", 100, incarnation=A)
        a[0]["args"].update({"trace": trace, "span": client, "parent": above})
        b = served(20, both(A, 1), "b.f", 90) + call(30, 1, "a.g", 70, tid=2, incarnation=B)
        b[0]["args"].update({"trace": trace, "span": server, "parent": client})
        b[4]["args"].update({"trace": trace, "span": nested, "parent": server})
        # The callee of the last one wrote no timeline with ids: it goes by the arrows.
        a += served(40, both(B, 1), "a.g", 60)
        found = {(span["name"], span["kind"]): span for span in spans(convert(a, b))}
        self.assertEqual({span["traceId"] for span in found.values()}, {trace})
        self.assertEqual([found[key]["spanId"] for key in [("b.f", otlp.CLIENT), ("b.f", otlp.SERVER), ("a.g", otlp.CLIENT)]],
                         [client, server, nested])
        self.assertEqual([found[key]["parentSpanId"] for key in [("b.f", otlp.CLIENT), ("b.f", otlp.SERVER), ("a.g", otlp.CLIENT),
                                                                  ("a.g", otlp.SERVER)]], [above, client, server, nested])
        self.assertNotIn("weft.trace", [one["key"] for one in found[("b.f", otlp.CLIENT)]["attributes"]])

    def test_errors_and_calls_that_did_not_end(self):
        found = check_rules(self, convert(call(1, 1, "f", 5, error="it failed") + call(2, 2, "g")))
        by_name = {span["name"]: span for span in found}
        self.assertEqual(by_name["f"]["status"], {"code": otlp.ERROR, "message": "it failed"})
        self.assertIn("not ended", by_name["g"]["status"]["message"])
        self.assertIn({"key": "weft.bytes", "value": {"intValue": "3"}}, by_name["f"]["attributes"])

    def test_a_callee_without_the_timeline_of_its_caller(self):
        found = check_rules(self, convert(served(1, both(A, 1), "f", 9)))
        self.assertEqual([("parentSpanId" in span, span["kind"]) for span in found], [(False, otlp.SERVER)])

    def test_the_same_files_give_the_same_ids(self):
        events = call(1, 1, "f", 5)
        self.assertEqual(convert(events), convert(events))

    def test_what_is_no_timeline(self):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write('{"traceEvents": []}')
            file.flush()
            done = subprocess.run([sys.executable, otlp.__file__, file.name], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("is no timeline of weft", done.stderr)


def real(folder, programs):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WEFT_TRACE_FILE": os.path.join(folder, "trace.%r.json")}
    subprocess.run([os.path.join(programs, "weftrun"), "-q", "-n", "2", os.path.join(programs, "hello_rpc")], env=environment, check=True,
                   timeout=100, stdout=subprocess.DEVNULL)
    return otlp.convert(glob.glob(os.path.join(folder, "trace.*.json")))


class Real(unittest.TestCase):
    programs = None

    def test_two_workers(self):
        if self.programs is None:
            self.skipTest("no --bin")
        with tempfile.TemporaryDirectory(prefix="weft-otlp-") as folder:
            found = check_rules(self, real(folder, self.programs))
        # Each of the two calls both functions of the other.
        self.assertEqual(sorted((span["name"], span["kind"]) for span in found if span["name"].startswith("hello.")),
                         sorted(2 * [(f"hello.{name}", kind) for name in ("greet", "twice") for kind in (otlp.SERVER, otlp.CLIENT)]))
        self.assertTrue(all("parentSpanId" in span for span in found if span["kind"] == otlp.SERVER))


def schema(programs):
    try:
        from google.protobuf import json_format
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    except ImportError:
        print("skipped: the Python package opentelemetry-proto is not installed")
        return 77
    with tempfile.TemporaryDirectory(prefix="weft-otlp-") as folder:
        text = json.dumps(real(folder, programs))
    # OTLP's JSON has ids in hexadecimal, where protobuf's own has base64.
    text = re.sub(r'"(traceId|spanId|parentSpanId)": "([0-9a-f]+)"',
                  lambda match: f'"{match.group(1)}": "{base64.b64encode(bytes.fromhex(match.group(2))).decode()}"', text)
    read = json_format.Parse(text, ExportTraceServiceRequest(), ignore_unknown_fields=False)
    count = sum(len(scope.spans) for resource in read.resource_spans for scope in resource.scope_spans)
    print(f"schema: ok, {count} spans")
    return 0 if count else 1


if __name__ == "__main__":
    if "--bin" in sys.argv:
        at = sys.argv.index("--bin")
        Real.programs = sys.argv[at + 1]
        del sys.argv[at:at + 2]
    if "--schema" in sys.argv:
        sys.exit(schema(Real.programs))
    unittest.main()
