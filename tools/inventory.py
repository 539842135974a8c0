"""The test inventory: which of our tests stands for which entry.

usage: inventory.py            writes docs/inventory.md
       inventory.py --check    fails when an entry has no test, or when docs/inventory.md is not what would be written

Entries are the tests of PyTorch's RPC that we answer for (RPC-n, DA-n), our acceptance scenarios (Xn), the defects that
were found by reading (DEF-n), the acceptance items of process groups and data parallelism (CL-n, DB-n), of pipelines (PP-n)
and of parameter servers (PS-n), and defects of c10d's Gloo that we must not have (Gn). A GoogleTest
case stands for an entry by its name: RPC_24_..., X7_...; a case that stands for several says so:
RPC_24_and_RPC_25_... . An entry without a test must be listed in tests/inventory_waiting.txt, one line each:

    RPC-7   rref             why it waits for that module
    RPC-82  does-not-apply   why
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = "docs/inventory.md"
WAITING = "tests/inventory_waiting.txt"
MODULES = ("rref", "collectives", "dist_autograd", "dist_optim", "ps", "pipeline")

# Entry -> PyTorch test names, in torch/testing/_internal/distributed/rpc.
PYTORCH = {
    1: "test_worker_id",
    2: "test_get_worker_infos",
    3: "test_duplicate_name",
    4: "test_duplicate_name_2",
    5: "test_reinit",
    6: "test_init_rpc_twice",
    7: "test_pg_init_no_rpc_init",
    8: "test_init_pg_then_rpc",
    9: "test_init_rpc_then_pg",
    10: "test_world_size_one",
    11: "test_invalid_names",
    12: "test_worker_info_pickle",
    13: "test_owner_equality",
    14: "test_wrong_types",
    15: "test_mismatched_type_for_options",
    16: "test_cannot_infer_backend_from_options",
    17: "test_set_and_get_num_worker_threads",
    18: "test_tensorpipe_set_default_timeout",
    19: "test_dynamic_rpc_init_rpc",
    20: "test_dynamic_rpc_new_rank_can_communicated_with_existing_rank",
    21: "test_dynamic_rpc_existing_rank_can_communicate_with_new_rank",
    22: "test_dynamic_rpc_init_rpc_without_rank",
    23: "test_dynamic_and_static_init_rpc_together",
    24: "test_add",
    25: "test_add_with_id",
    26: "test_int_callee",
    27: "test_send_to_rank",
    28: "test_self_add",
    29: "test_async_add",
    30: "test_multi_rpc",
    31: "test_nonzero",
    32: "test_scalar_add",
    33: "test_py_tensors",
    34: "test_py_tensors_in_container",
    35: "test_py_nested_pickle",
    36: "test_non_cont_tensors",
    37: "test_py_no_return_result",
    38: "test_py_class_instance_method test_py_class_constructor test_py_class_method test_py_class_static_method",
    39: "test_nested_rpc",
    40: "test_multi_layer_nested_async_rpc",
    41: "test_stress_light_rpc",
    42: "test_stress_heavy_rpc",
    43: "test_expected_src",
    44: "test_function_not_on_callee",
    45: "test_op_with_invalid_args",
    46: "test_py_raise_in_user_func",
    47: "test_py_raise_in_user_func_escaped_str",
    48: "test_py_function_exception",
    49: "test_handle_send_exceptions",
    50: "test_deadlock",
    51: "test_use_rpc_pickler",
    52: "test_default_timeout_used",
    53: "test_rpc_timeouts",
    54: "test_set_and_get_default_rpc_timeout",
    55: "test_rpc_builtin_timeout",
    56: "test_rpc_script_timeout",
    57: "test_rref_proxy_timeout",
    58: "test_rref_get_type_timeout_blocking test_rref_get_type_timeout_non_blocking",
    59: "test_rref_to_here_timeout",
    60: "test_future_wait_twice",
    61: "test_callback_simple",
    62: "test_callback_multi",
    63: "test_callback_chain",
    64: "test_callback_none",
    65: "test_callback_with_error",
    66: "test_callback_wrong_arg_num test_callback_wrong_arg_type",
    67: "test_callback_in_rpc",
    68: "test_future_nested_callback",
    69: "test_add_done_callback",
    70: "test_mark_future_twice",
    71: "test_future_done test_future_done_exception",
    72: "test_pickle_future",
    73: "test_wait_all",
    74: "test_wait_all_timeout",
    75: "test_wait_all_raise_in_user_func",
    76: "test_wait_all_raise_in_body",
    77: "test_wait_all_exit_early_python test_wait_all_exit_early_builtin test_wait_all_exit_early_script_function",
    78: "test_wait_all_with_partial_exception",
    79: "test_async_function_simple test_async_function_chained test_async_function_nested",
    80: "test_async_function_multi_fanout",
    81: "test_async_function_raise",
    82: "test_async_function_wrong_return_type",
    83: "test_async_class_rref_proxy test_async_class_rref_proxy_async test_async_class_rref_proxy_remote",
    84: "test_return_future",
    85: "test_builtin_remote_ret",
    86: "test_builtin_remote_self",
    87: "test_py_udf_remote",
    88: "test_multi_builtin_remote_ret test_multi_py_udf_remote",
    89: "test_py_rref_args",
    90: "test_py_rpc_rref_args",
    91: "test_py_rref_args_user_share",
    92: "test_nested_remote",
    93: "test_nested_rref",
    94: "test_nested_rref_stress",
    95: "test_rref_forward_chain",
    96: "test_rpc_return_rref",
    97: "test_return_local_rrefs",
    98: "test_pass_local_rrefs",
    99: "test_self_remote_rref_as_rpc_arg test_self_remote_rref_as_self_rpc_arg test_self_remote_rref_as_remote_arg "
        "test_self_remote_rref_as_self_remote_arg",
    100: "test_remote_same_worker",
    101: "test_call_method_on_rref",
    102: "test_rref_proxy_class",
    103: "test_rref_proxy_reuse",
    104: "test_rref_proxy_non_exist",
    105: "test_local_value_not_on_owner",
    106: "test_local_rref_no_fork",
    107: "test_remote_with_exception",
    108: "test_remote_throw",
    109: "test_user_rrefs_confirmed test_user_rrefs_confirmed_remote",
    110: "test_rref_context_debug_info",
    111: "test_rref_leak",
    112: "test_ignore_rref_leak",
    113: "test_non_garbage_collected_user_rref_due_to_local_circular_dependency",
    114: "test_use_rref_after_shutdown",
    115: "test_rref_py_pickle_not_supported",
    116: "test_rref_timeout",
    117: "test_remote_message_dropped_pickle test_remote_message_dropped_pickle_to_self",
    118: "test_builtin_remote_message_dropped_timeout test_udf_remote_message_dropped_timeout "
         "test_builtin_remote_message_dropped_timeout_to_self test_udf_remote_message_dropped_timeout_to_self",
    119: "test_udf_remote_message_delay_timeout test_remote_message_builtin_delay_timeout "
         "test_remote_message_script_delay_timeout test_udf_remote_message_delay_timeout_to_self "
         "test_remote_message_builtin_delay_timeout_to_self test_remote_message_script_delay_timeout_to_self",
    120: "test_check_failed_messages",
    121: "test_owner_rref_backward",
    122: "test_user_rref_backward",
    123: "test_wait_all_workers_dense test_wait_all_workers_twice_dense",
    124: "test_graceful_shutdown_with_uneven_workload",
    125: "test_shutdown_followed_by_rpc",
    126: "test_local_shutdown test_local_shutdown_with_rpc",
    127: "test_shutdown_errors",
    128: "test_wait_all_workers_timeout",
    129: "test_all_gather test_all_gather_timeout",
    130: "test_rpc_barrier_all test_rpc_barrier_subset test_rpc_barrier_partial_subset "
         "test_rpc_barrier_multithreaded",
    131: "test_remote_parameters",
    132: "test_get_module_rref",
    133: "test_train_eval",
    134: "test_unsupported_methods",
    135: "test_send_remote_module_over_the_wire",
    136: "test_create_remote_module_from_module_rref",
    137: "test_valid_device test_invalid_devices test_input_moved_to_cuda_device",
    138: "test_batch_updating_parameter_server",
    139: "test_rl_rpc",
}
# The same of distributed autograd, of remote modules and of tensors on devices (DA-n).
AUTOGRAD = {
    1: "test_autograd_context",
    2: "test_nested_context",
    3: "test_worker_ids_recorded",
    4: "test_error_in_context",
    5: "test_graph_for_builtin_call test_graph_for_python_call",
    6: "test_graph_for_builtin_remote_call test_graph_for_python_remote_call",
    7: "test_graph_for_py_nested_call",
    8: "test_graph_for_py_nested_call_itself",
    9: "test_no_graph_with_tensors_not_require_grad",
    10: "test_rpc_complex_args",
    11: "test_grad_only_on_return_value",
    12: "test_context_cleanup_tensor_with_grad test_context_cleanup_tensor_no_grad "
        "test_context_cleanup_no_tensors",
    13: "test_context_cleanup_nested_rpc",
    14: "test_context_cleanup_tensor_with_grad",
    15: "test_thread_local_context_id",
    16: "test_debug_info",
    17: "test_backward_simple test_backward_simple_self",
    18: "test_backward_multiple_round_trips",
    19: "test_backward_different_tensor_dims",
    20: "test_backward_different_dtypes",
    21: "test_backward_multiple_roots",
    22: "test_backward_multiple_output_tensors",
    23: "test_backward_unused_tensors",
    24: "test_mixed_requires_grad",
    25: "test_backward_without_rpc",
    26: "test_backward_simple_python_udf test_backward_simple_script_call "
        "test_backward_complex_python_udf test_backwards_nested_python_udf",
    27: "test_backward_rref test_backward_rref_multi test_backward_rref_nested",
    28: "test_trainer_ps",
    29: "test_backward_accumulate_grads",
    30: "test_nested_backward_accumulate_grads",
    31: "test_multiple_backward",
    32: "test_async_dist_autograd",
    33: "test_backward_verify_hooks",
    34: "test_post_hooks",
    35: "test_no_grad_copy test_no_grad_copy_sparse test_grad_copy_sparse_indices_extra_ref",
    36: "test_embedding_bag_with_no_grad_tensors",
    37: "test_backward_unused_send_function",
    38: "test_backward_without_context",
    39: "test_backward_invalid_args",
    40: "test_backward_no_grad_on_tensor",
    41: "test_backward_autograd_engine_error",
    42: "test_backward_python_udf_error",
    43: "test_backward_node_failure",
    44: "test_backward_node_failure_python_udf",
    45: "test_multiple_backward_with_errors",
    46: "test_clean_context_during_backward",
    47: "test_dist_autograd_profiling",
    48: "test_gpu_simple",
    49: "test_gpu_to_cpu_continuation test_gpu_to_cpu_continuation_gpu_root",
    50: "test_device_maps_backward_pass",
    51: "test_dist_autograd_sync_streams",
    52: "test_gradients_synchronizations",
    53: "test_dist_optim",
    54: "test_dist_optim_none_grads",
    55: "test_dist_optim_exception",
    56: "test_dist_optim_exception_on_constructor",
    57: "test_forward_sync test_forward_async test_forward_with_kwargs",
    58: "test_bad_module",
    59: "test_backward_no_ddp",
    60: "test_backward_ddp_inside",
    61: "test_backward_ddp_outside",
    62: "test_backward_ddp_outside_uneven_inputs",
    63: "test_ddp_comparison test_ddp_comparison_uneven_inputs",
    64: "test_ddp_dist_autograd_local_vs_remote test_ddp_dist_autograd_local_vs_remote_gpu",
    65: "test_ddp_dist_autograd_sparse_grads",
    66: "test_basic_gloo_ckpt_never test_basic_gloo_ckpt_never_find_unused test_basic_gloo_ckpt_always "
        "test_basic_gloo_ckpt_except_last test_basic_nccl_ckpt_never test_basic_nccl_ckpt_never_find_unused "
        "test_basic_nccl_ckpt_always test_basic_nccl_ckpt_except_last",
    67: "test_device_maps_wrong_worker_name test_device_maps_invalid_max_local_device "
        "test_device_maps_invalid_max_remote_device test_device_maps_invalid_min_device "
        "test_device_maps_many_to_one test_device_maps_one_to_many test_devices_option_mismatch "
        "test_devices_option_mismatch_reverse",
    68: "test_device_map_gpu_default test_device_map_gpu_non_default test_device_map_gpu_default_to_non_default "
        "test_device_map_gpu_non_default_to_default test_device_map_gpu_mixed_1..8 test_device_map_gpu_mixed_self_1..8",
    69: "test_device_maps_missing_config test_device_maps_missing_config_response "
        "test_device_maps_missing_config_loop test_device_maps_missing_config_response_loop "
        "test_device_maps_missing_config_remote test_device_maps_missing_config_remote_response "
        "test_device_maps_missing_config_not_timeout",
    70: "test_custom_stream test_custom_stream_multi test_custom_stream_nested test_custom_stream_nested_multi",
    71: "test_rref_to_here_synchronization1..4 test_rref_as_arg_synchronization1..5 "
        "test_rref_forward_synchronization1..4 test_owner_rref_forward_synchronization1..4",
    72: "test_cuda_future_device_as_int test_cuda_future_device_as_str test_cuda_future_device_as_device "
        "test_cuda_future_device_not_cuda test_cuda_future_can_extract_cuda_tensor "
        "test_cuda_future_can_extract_list_with_cuda_tensor "
        "test_cuda_future_can_extract_custom_class_with_cuda_tensor test_cuda_future_callback_changes_devices "
        "test_cuda_future_value_on_bad_device",
    73: "test_tensor_view_as_return_value",
}
SCENARIOS = {
    1: "reconnect",
    2: "delete before create",
    3: "join again in one process",
    4: "legal names, prefixes, churn",
    6: "no abort, whatever message fails",
    5: "unused calls",
    7: "error fidelity",
    8: "nested synchronous calls",
    9: "release with calls in flight",
    10: "a backward longer than the deadline of a call",
    11: "a failure tells everyone",
    12: "shutdown with a dead peer",
    13: "an optimizer's step, all or nothing",
    14: "timeouts, zero, infinite",
}
# Defects that were found by reading, by number, each with the tests that show it.
DEFECTS = {
    1: "a graceful leave of a dynamic group",
    2: "a result is a value",
    3: "calls whose time is over never start",
    4: "subscribers of the membership may block",
    5: "a store that is away for a moment parts no workers",
    6: "gatherings match after a restart, and after a failure",
    7: "answers that are kept take no room of what is sent",
    8: "code of users on threads that serve others",
    9: "what a worker that is gone has sent before",
    10: "the turn of an object, futures and coroutines",
    11: "a large group costs its store little",
    12: "few descriptors: the limit is raised, counted and named, optional sockets are given up first",
    13: "a store behind a slow line is reached",
    14: "messages that stand still have the time of their calls",
    15: "weftrun waits for no reader of its output",
    16: "shutdown keeps its deadline without the store",
    17: "answers to a worker without devices, the memory limit of a control group, a private socket that cannot be had",
    18: "errors of CUDA, and the capture of a graph, beside transfers to and from devices",
    19: "handlers that run at a time have streams of their own",
    21: "a backward whose gradients exceed the send budget, or find no room at their receiver",
    22: "no bound on the tensors, gradients, parameters and RRefs of one message",
    23: "an answer with a reference that is long on its way",
    24: "a connection that breaks in a step over several owners",
    25: "what a step reports is what has happened, and a reservation that expired refuses",
    26: "versions count the steps of a user's optimizer",
    27: "calls to oneself one after another, as deep as they come",
    28: "look-ups by identity: making an optimizer and reading gradients are linear",
    29: "a step beside the next backward, and after one that failed",
    30: "what is remembered of released contexts and of workers that are gone is bounded",
    31: "rates and state as PyTorch's: the first step of Rprop, plateaus, schedules that chain, state that is missing; gradients added by call",
    32: "what PyTorch users miss: optimizers, sparse momentum, schedules, options of a group, hooks, backward from a handler, the end of an RRef's creation",
}
# Process groups and data parallelism: what they must show. Items about speed are rows of the benchmarks.
COLLECTIVES = {
    1: "operations x types x reductions x ranks x sizes x layouts against a serial reference, bit-identical",
    2: "messages and bytes of every schedule as the formulas say",
    3: "random operations on random overlapping groups",
    4: "data parallelism equals Python's, and one process with the joined batch, in every mode",
    5: "buckets are assigned as c10d assigns them",
    6: "a dense part in DDP and an embedding at a server equal one model; contexts do not mix",
    13: "a small operation allocates nothing",
    14: "a killed rank is named within a second, a stopped one at the deadline",
    15: "what differs between ranks is an error on every rank",
    16: "no segments are left after crashes",
    17: "models that differ, parameters without gradient",
    18: "a job is started again, on one node and on several; sizes that change come later",
    19: "64 clients of a store, a port that is taken, a stale file",
    20: "two jobs at once on one machine",
    21: "NCCL with one rank",
    22: "two ranks on one GPU",
    23: "survivors of a killed rank make a new group",
    24: "groups by seed under the simulator",
    25: "groups as a c10d backend",
}
# What c10d's Gloo gets wrong.
GLOO = {
    1: "the sum of a strided tensor is wrong",
    2: "a broadcast into a strided tensor is wrong",
    3: "a difference in size ends the process",
    4: "after a timeout nothing names the cause",
    5: "reduce_scatter moves twice the bytes",
    6: "all_to_all of lists, uneven all_gather, short integers and integer averages are missing",
    7: "a dead peer is an address, not a rank",
    8: "an address of loopback is given to other hosts",
    9: "a difference in type ends the process",
}
# What LibTorch's data parallelism gets wrong.
DATA_PARALLEL = {
    1: "a missing gradient is found one iteration late, without names",
    2: "parameters used only under no_sync are not reduced",
    3: "static graphs and no_sync",
    4: "static graphs and two forwards before one backward",
    5: "zero_grad throws on gradients in buckets",
    6: "a changing graph with unused parameters",
    7: "the check of models ignores types, names and requires_grad",
    8: "'marked twice' with two forwards",
    9: "passes of several calls at once",
    10: "a parameter without gradient in a context",
    11: "the order of leftover buckets comes from a hash map",
    12: "a sampler loses its epoch",
    13: "uneven inputs hang",
    14: "no SyncBatchNorm on CPUs",
    15: "data_parallel of the C++ frontend",
    16: "strided gradients and channels-last parameters",
    17: "hooks outlive their reducer",
}
# Pipelines: what they must show. Items about speed on real clocks are rows of the benchmarks.
PIPELINES = {
    1: "plans and their verifier: round trips, every schedule accepted, mutations judged as by an exhaustive executor, known deadlocks refused",
    2: "simulator and schedules: closed forms and golden tables, exactly",
    3: "the run takes exactly the simulated time, for every schedule, also when steps overlap",
    4: "gradients and training equal one process: skips, tied weights, random numbers, several inputs and outputs, every kind of loss",
    5: "live activations and bytes are the predicted ones",
    6: "recompute: none, stage, selective, except-last",
    7: "the partitioner equals every partition tried; no layer is lost or repeated",
    8: "shapes that change without a handshake; skips go straight to their consumer",
    9: "a stage that throws, ends or stops is an error everywhere that names it; training goes on from the last step, bit for bit",
    10: "checkpoints by layer, loaded onto another number of stages",
    11: "data parallelism beside pipelines",
    12: "slow networks: the automatic schedule, codecs of activations",
    13: "optimizer post-validation",
    14: "asynchronous plans keep their versions of weights",
    15: "timelines of prediction and measurement, idle time by its reason, schedules compared and one recommended",
    16: "forward-only streaming",
}
# Parameter servers: what they must show. Items about speed on real clocks are rows of the benchmarks.
PARAMETER_SERVERS = {
    1: "ranges and consistent hashing lose and repeat nothing; large dense tables go in parts whose pushes overlap their pulls",
    2: "staleness never above the bound; BSP does not depend on the order of arrival",
    3: "update rules equal torch::optim, or their formula; rows equal dense tables where they are touched",
    4: "sparse tables: keys without collisions, results that do not depend on the servers, bytes of a row",
    5: "codecs on push and pull",
    6: "small operations travel together",
    7: "a worker's cache, and what it intends to read",
    8: "two copies: servers that die, stop or are cut off lose no acknowledged push and apply none twice",
    9: "snapshots: a cut over all servers, restored onto others",
    10: "servers leave while clients go on",
    11: "layers and trainer: tables in one autograd step with what is local and what is at other workers",
    12: "memory does not grow; what is seen",
}
CASE = re.compile(r"\b(?:TEST|TEST_F|TEST_P|TYPED_TEST|TYPED_TEST_P)\(\s*(\w+)\s*,\s*(\w+)\s*\)")
ENTRY = re.compile(r"(?:^|_and_)(?:(RPC|DA|DEF|CL|DB|PP|PS)_(\d+)|(X|G)_?(\d+))(?=_|$)")


def entries():
    """(id, title) of every entry, in order."""
    for number, names in PYTORCH.items():
        yield f"RPC-{number}", ", ".join(f"`{name}`" for name in names.split())
    for number, names in AUTOGRAD.items():
        yield f"DA-{number}", ", ".join(f"`{name}`" for name in names.split())
    for number, title in SCENARIOS.items():
        yield f"X{number}", title
    for number, title in sorted(DEFECTS.items()):
        yield f"DEF-{number}", title
    for number, title in COLLECTIVES.items():
        yield f"CL-{number}", title
    for number, title in GLOO.items():
        yield f"G{number}", title
    for number, title in DATA_PARALLEL.items():
        yield f"DB-{number}", title
    for number, title in PIPELINES.items():
        yield f"PP-{number}", title
    for number, title in PARAMETER_SERVERS.items():
        yield f"PS-{number}", title


def find_tests():
    """id -> sorted list of (suite.case, file)."""
    found = {}
    for folder, _, names in os.walk(os.path.join(ROOT, "tests")):
        for name in names:
            if not name.endswith((".cc", ".h")):
                continue
            path = os.path.join(folder, name)
            text = open(path, errors="replace").read()
            for suite, case in CASE.findall(text):
                for family, number, letter, scenario in ENTRY.findall(case):
                    key = f"{family}-{number}" if family else f"{letter}{scenario}"
                    found.setdefault(key, set()).add((f"{suite}.{case}", os.path.relpath(path, ROOT)))
    return {key: sorted(tests) for key, tests in found.items()}


def read_waiting(problems):
    waiting = {}
    path = os.path.join(ROOT, WAITING)
    if not os.path.exists(path):
        return waiting
    for number, line in enumerate(open(path), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        parts = line.split(None, 2)
        if len(parts) < 3 or (parts[1] not in MODULES and parts[1] != "does-not-apply"):
            problems.append(f"{WAITING}:{number}: a line is: id, module or does-not-apply, reason")
            continue
        waiting[parts[0]] = (parts[1], parts[2])
    return waiting


def make_page(problems):
    tests = find_tests()
    waiting = read_waiting(problems)
    known = dict(entries())
    for key in list(tests) + list(waiting):
        # Later entries of the inventory (RPC-85 and so on) may have tests before they are asked for.
        if key not in known and not key.startswith("RPC-"):
            problems.append(f"{key} is not an entry of the inventory")
    for key in waiting:
        if key in tests:
            problems.append(f"{key} has a test and is still listed in {WAITING}")
    lines = ["# Test inventory", "",
             "Made by `tools/inventory.py`; do not edit. `./dev lint` fails when an entry has no test.", "",
             "| entry | PyTorch's test, or the scenario | ours |", "|---|---|---|"]
    for key, title in known.items():
        if key in tests:
            ours = "<br>".join(f"`{name}` in {path}" for name, path in tests[key])
        elif key in waiting:
            module, reason = waiting[key]
            ours = f"does not apply: {reason}" if module == "does-not-apply" else f"waits for `{module}`: {reason}"
        else:
            ours = "**missing**"
            problems.append(f"{key} has no test: {title}")
        lines.append(f"| {key} | {title} | {ours} |")
    return "\n".join(lines) + "\n"


def main():
    problems = []
    page = make_page(problems)
    path = os.path.join(ROOT, PAGE)
    if "--check" in sys.argv[1:]:
        old = open(path).read() if os.path.exists(path) else ""
        if old != page:
            problems.append(f"{PAGE} is stale: run tools/inventory.py")
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as out:
            out.write(page)
    for problem in problems:
        print(f"inventory: {problem}")
    print(f"inventory: {len(list(entries()))} entries, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
