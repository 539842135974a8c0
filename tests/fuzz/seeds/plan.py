"""Seeds of plan_fuzzer.cc: plans in text and in JSON."""

HEAD = "weft-plan 1\nschedule s\nmicro_batches 1\nplacement 0 1\nedges 0>1\n"
GOOD = HEAD + "worker 0: F0.0 SF0>1.0 RB1>0.0 B0.0 U0\nworker 1: RF0>1.0 F1.0 B1.0 SB1>0.0 U1\n"
JSON = (
    '{"weft_plan": 1, "schedule": "s", "micro_batches": 1, "asynchronous": false, "placement": [0, 1], "edges": ["0>1"],'
    ' "tied": [[0, 1]], "workers": [["F0.0", "SF0>1.0", "RB1>0.0", "B0.0", "D0", "U0"],'
    ' ["RF0>1.0", "F1.0", "I1.0", "SB1>0.0", "W1.0", "D1", "U1"]]}'
)


def refused(rule, text):
    return f"invalid_argument: plan 's' of 2 stages and 1 micro-batches is refused ({rule}): {text}"


SEEDS = {
    "accepted": (GOOD.encode(), "ok"),
    "accepted_json": (JSON.encode(), "ok"),
    "deadlock": (
        (HEAD + "worker 0: RB1>0.0 SF0>1.0\nworker 1: RF0>1.0 SB1>0.0\n").encode(),
        refused(
            "VERIFY-2",
            "deadlock with sends that never wait: worker 0: RB1>0.0 waits for worker 1: RF0>1.0 waits for worker 0 again",
        ),
    ),
    "edge_backwards": (
        GOOD.replace("edges 0>1", "edges 1>0").encode(),
        "invalid_argument: plan, line 6: expected an action such as 'F0.1', found 'SF0>1.0'",
    ),
    "empty": (b"", "invalid_argument: plan, line 1: expected 'weft-plan 1', found ''"),
    "leading_zero": (
        GOOD.replace("F0.0 S", "F0.00 S").encode(),
        "invalid_argument: plan, line 6: expected an action such as 'F0.1', found 'F0.00'",
    ),
    "many_micro_batches": (
        GOOD.replace("batches 1", "batches 9999999").encode(),
        "invalid_argument: plan: a plan of 9999999 micro-batches: 1 to 65536",
    ),
    "no_end": (GOOD[:-1].encode(), "invalid_argument: plan, line 8: expected 'the next worker', found 'the end'"),
    "unpaired": (
        GOOD.replace("SB1>0.0 ", "").encode(),
        refused("VERIFY-1", "worker 0: RB1>0.0: nobody sends it"),
    ),
    "wrong_order": (
        GOOD.replace("F1.0 B1.0", "B1.0 F1.0").encode(),
        refused("VERIFY-3", "worker 1: B1.0: its forward has not run"),
    ),
}
