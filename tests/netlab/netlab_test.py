"""Workers on different hosts, as tools/netlab.py makes them. Exit code 77, with the reason, where it cannot.

usage: netlab_test.py CASE [--bin FOLDER]     CASE: one of the names below
"""
import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

NETLAB = Path(__file__).resolve().parents[2] / "tools" / "netlab.py"
SKIPPED = 77


def netlab(*arguments, limit=90):
    with tempfile.TemporaryDirectory(prefix="weft-netlab-") as folder:
        done = subprocess.run(
            [sys.executable, str(NETLAB), "--timeout", f"{limit}s", *arguments],
            cwd=folder,  # for what the programs leave
            capture_output=True,
            text=True,
            timeout=limit + 30,
        )
    print(done.stdout, done.stderr, sep="\n")
    if done.returncode == SKIPPED:
        sys.exit(SKIPPED)
    return done


def expect(truth, what):
    if not truth:
        sys.exit(f"FAILED: {what}")


# Bounds that no load on the machine can break: packets are never early, and never more than the rate allows.


def delay(_):
    """5 ms each way are a round trip of 10 ms, not less."""
    done = netlab("--delay", "5ms", "--probe")
    expect(done.returncode == 0, "the probe runs")
    expect(json.loads(done.stdout)["round_trip_ms"] >= 10.0, "a round trip takes two delays")


def rate(_):
    """No more than the rate, beyond what a queue may hold at the end."""
    done = netlab("--rate", "20mbit", "--probe")
    expect(done.returncode == 0, "the probe runs")
    result = json.loads(done.stdout)
    expect(result["mbit_per_s"] <= 21, "the rate is a bound")
    expect(result["passed"] > 1000, "the packets went through the lab")


def loss(_):
    """TCP gets everything through; the lost packets are counted."""
    done = netlab("--loss", "2%", "--rate", "20mbit", "--delay", "1ms", "--probe")
    expect(done.returncode == 0, "the probe runs")
    expect(json.loads(done.stdout)["lost"] > 0, "packets were lost")


def timeout(_):
    """Nothing outlives its time; the code says so."""
    done = netlab("--", "sleep", "600", limit=1)
    expect(done.returncode == 124, "the time is over")


def failure(_):
    """The first failure is the result."""
    done = netlab("--", "sh", "-c", "exit $((NETLAB_HOST * 3))")
    expect(done.returncode == 3, "the code of the host that failed")
    done = netlab("--", "./no_such_program")
    expect(done.returncode == 2 and "no program './no_such_program'" in done.stderr, "a wrong command is named")


def hello(binaries):
    """Two workers that share no loopback and no local socket meet by MASTER_ADDR and call each other."""
    done = netlab("--delay", "2ms", "--", str(binaries / "hello_rpc"))
    expect(done.returncode == 0, "both workers end well")
    for host in (0, 1):
        expect(f"[host{host}] worker{1 - host} greets worker{host}: hello" in done.stdout, f"host {host} is greeted")


def training(binaries):
    """A parameter server and two trainers on three hosts, cut off from each other for a second in the middle.

    660 updates of each trainer, one after the other, are 660 round trips: 1.3 s, however fast the machine is.
    """
    done = netlab("--hosts", "3", "--delay", "1ms", "--cut", "0.5s-1.5s", "--", str(binaries / "async_ps"))
    expect(done.returncode == 0, "all workers end well")
    expect(int(re.search(r"(\d+) cut", done.stderr)[1]) > 0, "packets were cut off while it trained")
    accuracy = re.search(r"accuracy=([0-9.]+)", done.stdout)
    expect(accuracy and float(accuracy[1]) >= 0.95, "it trains to an accuracy of 0.95")


CASES = {case.__name__: case for case in (delay, rate, loss, timeout, failure, hello, training)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--bin", type=Path, default=Path("build/bin"))
    options = parser.parse_args()
    CASES[options.case](options.bin.resolve())
    print(f"{options.case}: ok")


if __name__ == "__main__":
    main()
