#!/usr/bin/env python3
"""What a distributed backward spent its time on, from the timelines of all workers.

usage: tools/backward_path.py FILE... [--pass WORDS] [--svg OUT]

FILE... are what WEFT_TRACE_FILE='trace.%r.json' made the workers of one job write. For each pass: who took part,
with nodes, messages and bytes of gradients, and its critical path: the chain of runs and of ways between workers that
ends with the root's last run. Shortening anything else does not shorten the pass.

A run waited for the gradients of some messages and, at the same worker, for the run before it. It is put down to the
run before it when it began at once after that, else to the run elsewhere that gave its gradients last. Clocks of
different machines are put right by the arrows, as NTP does: the fastest message one way takes as long as the other way.

    build/bin/weftrun -n 3 --help       how to start workers
    docs/sight.md                       what is in a timeline
"""
import argparse
import collections
import html
import json
import sys

AT_ONCE_US = 50.0  # two runs of one worker with less than this between them: the second waited for the first


class Run:
    """Nodes of a pass that ran together at one worker."""

    def __init__(self, worker, event, offset):
        self.worker = worker
        self.start = event["ts"] + offset
        self.end = self.start + event["dur"]
        self.nodes = event["args"]["nodes"]
        self.after = event["args"]["after"]
        self.sources = []  # the runs that gave the gradients it waited for
        self.before = None  # the run before it at this worker


class Part:
    """A pass at one worker."""

    def __init__(self, worker, start, root):
        self.worker = worker
        self.start = start
        self.root = root
        self.end = None
        self.work = None
        self.runs = []


class Pass:
    def __init__(self, name):
        self.name = name
        self.parts = {}

    def root_part(self):
        return next((part for part in self.parts.values() if part.root == part.worker), None)


def read_worker(path):
    """The worker's name, its events, and what makes its clock the calendar's."""
    with open(path, encoding="utf-8") as file:
        timeline = json.load(file)
    offset = float(timeline["otherData"]["weft_calendar_offset_us"])
    events = timeline["traceEvents"]
    names = [event["args"]["name"] for event in events if event.get("name") == "process_name"]
    if not names:
        raise ValueError("it names no process")
    return names[0], events, offset


def read_passes(paths):
    passes = {}
    gave = {}  # an arrow's id: the run that it leaves
    takes = []  # (run, an arrow's id)
    for path in paths:
        try:
            worker, events, offset = read_worker(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path} is no timeline of weft's: {error}") from error
        run = None
        for event in events:
            kind, category, name = event["ph"], event.get("cat"), event.get("name", "")
            if category == "backward" and kind in "be":
                here = passes.setdefault(name, Pass(name))
                if kind == "b":
                    here.parts[worker] = Part(worker, event["ts"] + offset, event["args"]["root"])
                elif worker in here.parts:
                    here.parts[worker].end = event["ts"] + offset
                    here.parts[worker].work = event["args"]
            elif category == "run" and kind == "X":
                run = None
                if name in passes and worker in passes[name].parts:
                    run = Run(worker, event, offset)
                    passes[name].parts[worker].runs.append(run)
            elif category == "backward" and run is not None:
                # The arrows of a run follow it in the file.
                if kind == "s":
                    gave[event["id"]] = run
                elif kind == "f":
                    takes.append((run, event["id"]))
    for run, arrow in takes:
        if arrow in gave:
            run.sources.append(gave[arrow])
    for worker, error in clock_errors(passes).items():
        if abs(error) > 1.0:
            print(f"the clock of {worker} is {'ahead' if error > 0 else 'behind'} by {abs(error) / 1000:.3f} ms: put right", file=sys.stderr)
        put_right(passes, worker, error)
    for here in passes.values():
        for part in here.parts.values():
            part.runs.sort(key=lambda run: run.start)
            for first, second in zip(part.runs, part.runs[1:]):
                second.before = first
    return passes


def clock_errors(passes):
    """For each worker, how far its clock is ahead of the first root's, as the arrows between runs show it."""
    least = {}  # (from, to): the shortest way of an arrow
    for here in passes.values():
        for part in here.parts.values():
            for run in part.runs:
                for source in run.sources:
                    way = run.start - source.end
                    key = (source.worker, run.worker)
                    least[key] = min(way, least.get(key, way))
    workers = sorted({worker for here in passes.values() for worker in here.parts})
    roots = [here.root_part().worker for here in passes.values() if here.root_part() is not None]
    errors = {}
    for start in roots[:1] + workers:
        if start in errors:
            continue
        errors[start] = 0.0
        near = [start]
        while near:
            worker = near.pop()
            for other in workers:
                there, back = least.get((worker, other)), least.get((other, worker))
                if other in errors or there is None or back is None:
                    continue
                errors[other] = errors[worker] + (there - back) / 2
                near.append(other)
    return errors


def put_right(passes, worker, error):
    for here in passes.values():
        part = here.parts.get(worker)
        if part is None:
            continue
        part.start -= error
        if part.end is not None:
            part.end -= error
        for run in part.runs:
            run.start -= error
            run.end -= error


def waited_for(run):
    """The run that this one waited for last, or None."""
    if run.before is not None and run.start - run.before.end < AT_ONCE_US:
        return run.before
    if run.sources:
        return max(run.sources, key=lambda source: source.end)
    return run.before


def critical_path(here):
    """The runs of the path, the first one first. Empty when the root's timeline is missing or has no run."""
    root = here.root_part()
    if root is None or not root.runs:
        return []
    path = [max(root.runs, key=lambda run: run.end)]
    seen = {path[0]}
    while True:
        source = waited_for(path[-1])
        if source is None or source in seen:  # clocks that differ by more than a message's way could make a circle
            return path[::-1]
        seen.add(source)
        path.append(source)


def steps_of(here):
    """The critical path as (from, to, worker, words, kind): without a gap, from the pass's begin to its end."""
    root = here.root_part()
    path = critical_path(here)
    steps = []
    if not path:
        return steps
    at = root.start
    for index, run in enumerate(path):
        if index == 0:
            words, kind = "finds out what the losses depend on", "wait"
        elif run.worker == path[index - 1].worker:
            words, kind = "between two runs", "wait"
        else:
            words, kind = f"on the way from {path[index - 1].worker}: {run.after}", "way"
        steps.append((at, run.start, run.worker, words, kind))
        steps.append((run.start, run.end, run.worker, f"{run.nodes} nodes", "run"))
        at = run.end
    if root.end is not None:
        steps.append((at, root.end, root.worker, "the last answers", "wait"))
    return steps


def report(here, out):
    root = here.root_part()
    if root is None:
        parts = ", ".join(sorted(here.parts))
        print(f"{here.name}: no timeline of its root is among the files (it took part at {parts})", file=out)
        return
    length = f"{(root.end - root.start) / 1000:.3f} ms" if root.end is not None else "without an end"
    print(f"{here.name}: {length}, root {root.worker}", file=out)
    for worker in sorted(here.parts):
        part = here.parts[worker]
        if part.work is None:
            print(f"  {worker:<12} without an end", file=out)
            continue
        work = part.work
        failed = f"  failed: {work['error']}" if work["error"] else ""
        print(f"  {worker:<12} {work['nodes']:>5} nodes  gradients of {work['gradients_received']} messages in "
              f"({work['bytes_received']} bytes), of {work['gradients_sent']} out ({work['bytes_sent']} bytes)  "
              f"{(part.end - part.start) / 1000:.3f} ms{failed}", file=out)
    steps = steps_of(here)
    total = collections.Counter()
    for begin, end, worker, _, kind in steps:
        total["between workers" if kind == "way" else f"{'in nodes' if kind == 'run' else 'besides'} at {worker}"] += end - begin
    if steps:
        shares = ", ".join(f"{time / 1000:.3f} ms {what}" for what, time in total.most_common())
        print(f"  critical path: {shares}", file=out)
        print("       at ms      for ms  worker        ", file=out)
        for begin, end, worker, words, _ in steps:
            print(f"  {(begin - root.start) / 1000:>10.3f}  {(end - begin) / 1000:>10.3f}  {worker:<12}  {words}", file=out)
    print(file=out)


def draw(here):
    """The pass as a picture: a row per worker, a box per run, the critical path dark."""
    workers = sorted(here.parts)
    root = here.root_part()
    begin = min(part.start for part in here.parts.values())
    end = max([part.end or part.start for part in here.parts.values()] + [r.end for p in here.parts.values() for r in p.runs])
    left, width, row = 110, 900, 56
    height = row * len(workers) + 70

    def x(time):
        return left + (time - begin) / max(end - begin, 1e-9) * width

    def y(worker):
        return 44 + workers.index(worker) * row

    path = critical_path(here)
    links = set(zip(path, path[1:]))
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 30}" height="{height}" '
             'font-family="sans-serif" font-size="12">',
             f'<text x="10" y="20">{html.escape(here.name)}: {(root.end or end) - root.start:.0f} us at {html.escape(root.worker)}; '
             'dark: the critical path</text>']
    for worker in workers:
        part = here.parts[worker]
        lines.append(f'<text x="10" y="{y(worker) + 19}">{html.escape(worker)}</text>')
        lines.append(f'<rect x="{x(part.start):.1f}" y="{y(worker)}" width="{x(part.end or end) - x(part.start):.1f}" height="30" '
                     'fill="#eef2f6"/>')
    for part in here.parts.values():
        for run in part.runs:
            for source in run.sources:
                color, stroke = ("#b03a2e", 2) if (source, run) in links else ("#9aa5b1", 1)
                lines.append(f'<line x1="{x(source.end):.1f}" y1="{y(source.worker) + 15}" x2="{x(run.start):.1f}" '
                             f'y2="{y(run.worker) + 15}" stroke="{color}" stroke-width="{stroke}"/>')
    for part in here.parts.values():
        for run in part.runs:
            color = "#b03a2e" if run in path else "#6c8ebf"
            lines.append(f'<rect x="{x(run.start):.1f}" y="{y(run.worker) + 4}" width="{max(x(run.end) - x(run.start), 1.5):.1f}" '
                         f'height="22" fill="{color}"><title>{run.nodes} nodes, {run.end - run.start:.0f} us, '
                         f'{html.escape(run.after or "from the losses")}</title></rect>')
    for tenth in range(0, 11, 2):
        time = begin + (end - begin) * tenth / 10
        lines.append(f'<text x="{x(time):.1f}" y="{height - 10}" text-anchor="middle" fill="#667">{time - begin:.0f} us</text>')
    lines.append("</svg>\n")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--pass", dest="words", default="", help="only passes whose name ends with these words")
    parser.add_argument("--svg", metavar="OUT", help="draw the longest of these passes")
    args = parser.parse_args()
    passes = [here for name, here in sorted(read_passes(args.files).items()) if name.endswith(args.words)]
    if not passes:
        wanted = f" whose name ends with '{args.words}'" if args.words else ""
        raise SystemExit(f"no backward pass{wanted} in {len(args.files)} files; a pass is written when the worker leaves")
    passes.sort(key=lambda here: min(part.start for part in here.parts.values()))
    for here in passes:
        report(here, sys.stdout)
    if args.svg:
        drawn = [here for here in passes if here.root_part() is not None and here.root_part().end is not None]
        if not drawn:
            raise SystemExit("none of the passes has a root with an end among the files: nothing to draw")
        with open(args.svg, "w", encoding="utf-8") as out:
            out.write(draw(max(drawn, key=lambda here: here.root_part().end - here.root_part().start)))
        print(f"drawn: {args.svg}")


if __name__ == "__main__":
    main()
