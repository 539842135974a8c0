"""What two real workers serve at /metrics, as `promtool check metrics` sees it.

usage: promtool_test.py --worker PROGRAM

Exit code 77, with the reason, where promtool (Debian: prometheus) is not installed.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", required=True)
    args = parser.parse_args()
    promtool = shutil.which("promtool")
    if not promtool:
        print("skipped: promtool is not installed (Debian: prometheus)")
        return 77
    with tempfile.TemporaryDirectory(prefix="weft-promtool-") as folder:
        workers, logs = [], []
        for rank in range(2):
            logs.append(os.path.join(folder, f"log{rank}"))
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "WEFT_STORE": f"file://{folder}/store", "OMP_NUM_THREADS": "1",
                           "WEFT_JOB_ID": "7e57", "WEFT_NAME": f"worker{rank}", "WEFT_METRICS": "127.0.0.1:0"}
            workers.append(subprocess.Popen([args.worker, "play"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=open(logs[-1], "w"), text=True))
        try:
            for worker in workers:
                line = worker.stdout.readline()
                assert line.startswith("joined "), line
            workers[0].stdin.write("call worker1 bump 1 60000 0\n")
            workers[0].stdin.flush()
            answer = workers[0].stdout.readline()
            assert answer.startswith("ok"), answer
            address = re.search(r"metrics at (http://\S+)", open(logs[0]).read()).group(1)
            text = ""
            # Numbers of lanes are those of the last heartbeat.
            while "weft_rpc_lane_bytes_sent_total" not in text:
                text = urllib.request.urlopen(address, timeout=60).read().decode()
        finally:
            for worker in workers:
                worker.stdin.close()
            for worker in workers:
                worker.wait(timeout=60)
        done = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False)
        print(done.stdout + done.stderr)
        print(f"{len(re.findall('^# TYPE weft_', text, re.M))} metrics, promtool ended with {done.returncode}")
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
