"""tools/backward_path.py: on timelines made here, whose critical path is known, and on those of a real job.

usage: backward_path_test.py TOOL [WEFTRUN AUTOGRAD_TOUR]
"""
import json
import os
import subprocess
import sys
import tempfile

NAME = "backward 1 of autograd context 0/1/1"
ARROWS = iter(range(1, 1000))


def tool(*arguments):
    result = subprocess.run([sys.executable, sys.argv[1], *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, timeout=60)
    return result.returncode, result.stdout, result.stderr


def expect(condition, words, output=""):
    if not condition:
        raise SystemExit(f"{words}\n{output}")


class Worker:
    """A timeline under construction. Times are microseconds of a clock that all workers share; the file's are its own."""

    def __init__(self, name, rank, offset, wrong=0.0):
        self.name, self.rank, self.offset, self.wrong = name, rank, offset, wrong
        self.events = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}]

    def event(self, kind, category, name, time, **more):
        self.events.append({"ph": kind, "cat": category, "name": name, "ts": time - self.offset, "pid": self.rank, "tid": 1,
                            **more})

    def begins(self, time):
        self.event("b", "backward", NAME, time, id="0x1", args={"root": "a"})

    def run(self, start, end, nodes, takes=(), after=""):
        """Returns the arrow that leaves it."""
        self.event("X", "run", NAME, start, dur=end - start, args={"after": after, "nodes": nodes})
        for arrow in takes:
            self.event("f", "backward", "gradients", start, id=hex(arrow), bp="e")
        arrow = next(ARROWS)
        self.event("s", "backward", "gradients", end, id=hex(arrow))
        return arrow

    def ends(self, time, error=""):
        self.event("e", "backward", NAME, time, id="0x1",
                   args={"nodes": 3, "gradients_received": 1, "bytes_received": 4, "gradients_sent": 1, "bytes_sent": 4,
                         "error": error})

    def write(self, folder):
        path = os.path.join(folder, f"{self.name}.json")
        with open(path, "w", encoding="utf-8") as out:
            json.dump({"otherData": {"weft_calendar_offset_us": str(self.offset + self.wrong)}, "traceEvents": self.events}, out)
        return path


def made(folder, wrong):
    """a is the root; b and c get gradients from its first run; c takes longer, and a's second run waits for both."""
    a, b, c = Worker("a", 0, 1e6), Worker("b", 1, 5e6, wrong), Worker("c", 2, 9e6)
    a.begins(0)
    to_b = a.run(100, 300, 7)
    b.begins(400)
    c.begins(400)
    from_b = b.run(500, 900, 5, [to_b], "the gradients of messages 1")
    from_c = c.run(500, 4500, 5, [to_b], "the gradients of messages 1")
    b.ends(950)
    c.ends(4550)
    a.run(4700, 4800, 2, [from_b, from_c], "the gradients of messages 2 3")
    a.run(4810, 4900, 1)
    a.ends(5000)
    return [worker.write(folder) for worker in (a, b, c)]


def steps(output):
    return [line.split(None, 3) for line in output.splitlines() if line[:8].strip().replace(".", "").isdigit()]


def check_made(folder):
    code, output, _ = tool(*made(folder, 0.0))
    expect(code == 0, "the tool failed", output)
    got = [(float(at), float(took), worker) for at, took, worker, _ in steps(output)]
    wanted = [(0, 0.1, "a"), (0.1, 0.2, "a"), (0.3, 0.2, "c"), (0.5, 4.0, "c"), (4.5, 0.2, "a"), (4.7, 0.1, "a"), (4.8, 0.01, "a"),
              (4.81, 0.09, "a"), (4.9, 0.1, "a")]
    expect(got == wanted, f"the path is {got}, not {wanted}", output)
    expect("4.000 ms in nodes at c" in output, "c's share is missing", output)

    # A clock that is wrong by 80 ms is put right, and the path stays the same.
    code, skewed, said = tool(*made(folder, 80_000.0))
    expect(code == 0 and "the clock of b is ahead by" in said, "no word of b's clock", said)
    expect(output == skewed, "a wrong clock changed the path", skewed)

    code, output, _ = tool(*made(folder, 0.0)[1:])
    expect(code == 0 and "no timeline of its root" in output, "no word of the missing root", output)
    code, _, said = tool("--pass", "no such", *made(folder, 0.0))
    expect(code != 0 and "no backward pass" in said, "a pass that is not there was found", said)
    broken = os.path.join(folder, "broken.json")
    with open(broken, "w", encoding="utf-8") as out:
        out.write("[]")
    code, _, said = tool(broken)
    expect(code != 0 and "is no timeline" in said and "Traceback" not in said, "a broken file", said)


def check_real(folder, weftrun, tour):
    environment = dict(os.environ, WEFT_TRACE_FILE=os.path.join(folder, "trace.%r.json"))
    result = subprocess.run([weftrun, "-n", "3", tour], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, timeout=100)
    expect(result.returncode == 0, "autograd_tour failed", result.stdout)
    picture = os.path.join(folder, "pass.svg")
    files = [os.path.join(folder, f"trace.{rank}.json") for rank in range(3)]
    code, output, said = tool(*files, "--pass", "/1", "--svg", picture)
    expect(code == 0, "the tool failed", output + said)
    for worker in ("worker0", "worker1", "worker2"):
        expect(f"in nodes at {worker}" in output, f"{worker} is not on the path of a loss that went through all three", output)
    path = steps(output)
    expect(path[0][2] == "worker0" and path[-1][2] == "worker0", "the path leaves the root and comes back", output)
    end = float(path[0][0])
    for at, took, _, _ in path:
        expect(abs(float(at) - end) < 0.002, f"the path has a gap at {at}", output)
        end = float(at) + float(took)
    with open(picture, encoding="utf-8") as file:
        expect(file.read().count("<rect") > 6, "the picture has no boxes")


def main():
    with tempfile.TemporaryDirectory() as folder:
        check_made(folder)
        if len(sys.argv) > 2:
            check_real(folder, sys.argv[2], sys.argv[3])
    print("ok")


if __name__ == "__main__":
    main()
