"""What workers have sent, counted where it is sent: ours by the worker's own counters, the peer's by the
lines that its agent logs."""

import time
from pathlib import Path

SETTLED_S = 0.2  # nothing was sent for so long
SETTLE_LIMIT_S = 10
# What the agent of torch logs for a message that it sends; "done sending" is not one.
LOGGED = (" is sending request #", " is sending response to request #")


def logged_messages(path):
    text = Path(path).read_text(errors="replace")
    return sum(text.count(line) for line in LOGGED)


def read_counters(group, ours):
    """What all workers have sent so far, by name; `messages` always."""
    if not ours:
        return {"messages": sum(logged_messages(rank.log_path) for rank in group.ranks)}
    total = {}
    for answer in group.ask("counters", 20):
        for key, value in answer.items():
            total[key] = total.get(key, 0) + value
    return total


def settled(read):
    """What `read` gives once nothing more is sent: the last acknowledgements come after the answer of a
    command."""
    deadline = time.monotonic() + SETTLE_LIMIT_S
    last = read()
    while time.monotonic() < deadline:
        time.sleep(SETTLED_S)
        now = read()
        if now["messages"] == last["messages"]:
            break
        last = now
    return now
