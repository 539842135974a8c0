"""Seeds of ps_copy_fuzzer.cc: a byte that says what it is, one with the number of tensors, then the message."""

import struct

from .ps import MAX, definition, push
from .wire import field, fixed64, groups, varint

FIND, FOUND, COPY, COPIED, MAP, BATCH, RESULTS, MANIFEST, STATE, MOVE, LISTED, SERVERS, SHARE, SHARED = range(14)


def message(what, *parts, tensors=0):
    return bytes([what, tensors]) + b"".join(parts)


def place(name, incarnation=7):
    return field(1, name) + fixed64(2, incarnation)


def the_map(epoch=3, owner=b"ps0", backup=b"ps1", ready=1):
    return (field(1, epoch) + (field(2, place(owner)) if owner is not None else b"")
            + (field(3, place(backup, 8)) if backup is not None else b"") + field(4, ready))


def worker(number=1, incarnation=9):
    return field(1, number) + fixed64(2, incarnation)


def client(number=1, clock=0, floor=1, outcomes=(), of=None):
    return (field(1, worker() if of is None else of) + field(2, number) + field(3, clock) + field(4, floor)
            + b"".join(field(5, o) for o in outcomes))


def outcome(number, told=b"", dropped=0):
    return field(1, number) + (field(2, told) if told else b"") + field(3, dropped)


def status(code=9, kind=4, text=b"no"):
    return field(1, code) + field(2, kind) + field(3, text)


def held(step=0, number=3, kind=1, tensors=1, of=1):
    return (field(1, worker()) + field(2, of) + field(3, number) + field(4, step) + field(5, kind)
            + field(7, tensors))


def image(what=None, servers=(b"ps0", b"ps1"), clients=(), left=(), gone=(), started=1, step=0, pushes=()):
    return (field(1, definition() if what is None else what) + b"".join(field(2, s) for s in servers)
            + b"".join(field(3, c) for c in clients) + b"".join(field(4, c) for c in left)
            + b"".join(field(5, g) for g in gone) + field(6, len(clients)) + field(7, started) + field(8, 4)
            + field(9, step) + b"".join(field(10, h) for h in pushes))


def copy(*parts, name=b"w", index=1, where=None, position=5, tensors=0):
    return message(COPY, field(1, name), field(2, index), field(3, the_map() if where is None else where),
                   field(4, position), *parts, tensors=tensors)


def with_image(*args, index=1, **kwargs):
    return copy(field(5, image(*args, **kwargs)), index=index)


def entry(request=None, refused=None, gone=None, tensors=0, evicted=()):
    return field(6, (field(1, worker()) + field(2, request) if request is not None else b"")
                 + (field(3, refused) if refused is not None else b"")
                 + (field(4, gone) if gone is not None else b"") + field(5, tensors)
                 + (field(6, b"".join(struct.pack("<Q", key) for key in evicted)) if evicted else b""))


def move(*, name=b"w", index=1, to=b"ps3", number=5):
    return message(MOVE, field(1, name), field(2, index), field(3, place(to)), fixed64(4, number))


def share(name=b"net", socket=b"s" * 16, secret=b"t" * 16):
    return message(SHARE, field(1, name), field(2, socket), field(3, secret))


def parameter(name=b"w", dtype=1, shape=(3, 4)):
    return field(1, field(1, name) + field(2, dtype) + b"".join(field(3, n) for n in shape))


def listed(name=b"w", index=0, size=100, copies=2):
    return field(1, field(1, name) + field(2, index) + field(3, size) + field(4, copies))


def a_file(name=b"snapshot-1-a-1-0.safetensors"):
    return field(2, field(1, name) + field(2, 512) + fixed64(3, 99))


def table(name=b"w", servers=(b"ps0", b"ps1"), files=(0, 1), what=None):
    return field(3, field(1, name) + field(2, definition() if what is None else what)
                 + b"".join(field(3, s) for s in servers)
                 + field(4, field(1, b"c0") + field(2, worker()) + field(3, 1) + field(4, 12) + field(6, b"line 7"))
                 + b"".join(field(5, f) for f in files))


def manifest(*parts):
    return message(MANIFEST, field(1, 3), *parts)


def run(request=0, keys=(1, 2, 1), numbers=(1, 5), floors=(0, 3)):
    return field(3, field(1, request) + b"".join(field(n, b"".join(varint(v) for v in values))
                                                 for n, values in ((2, keys), (3, numbers), (4, floors)) if values))


def batch_of_a_run(*runs, request=None, tensors=2):
    return message(BATCH, field(1, A_PUSH if request is None else request), field(2, varint(tensors)), *runs,
                   tensors=tensors)


def result(more, answer=field(1, 5) + field(4, 3), tensors=0):
    return field(1, field(1, answer) + (field(3, tensors) if tensors else b"") + field(4, more))


BSP = dict(mode=2, clients=2)
A_PUSH = field(1, 7) + field(2, 2) + field(4, push())
A_PULL = field(1, 7) + field(2, 2) + field(6, field(1, 3))

SEEDS = {
    "a_find": (message(FIND, field(1, b"w"), field(2, 1), field(3, 1)), "ok"),
    "a_find_of_no_table": (message(FIND, field(2, 1)), "protocol: a table's name"),
    "a_find_of_a_part_that_cannot_be": (message(FIND, field(1, b"w"), field(2, 4096)), "protocol: part 4096"),
    "found_here": (message(FOUND, field(1, 7), field(2, the_map()), field(3, 1)), "ok"),
    "found_nowhere": (message(FOUND), "ok"),
    "found_with_an_odd_map": (message(FOUND, field(2, the_map(epoch=0))), "protocol: a map without epoch"),
    "a_map": (message(MAP, the_map()), "ok"),
    "a_map_of_one_copy": (message(MAP, the_map(backup=None, ready=0)), "ok"),
    "a_map_of_epoch_0": (message(MAP, the_map(epoch=0)), "protocol: a map without epoch"),
    "a_map_without_owner": (message(MAP, the_map(owner=None)), "protocol: a map without epoch"),
    "a_map_ready_without_backup": (message(MAP, the_map(backup=None)), "protocol: a map without epoch"),
    "a_map_whose_backup_has_no_name": (message(MAP, the_map(backup=b"")), "protocol: a map without epoch"),
    "no_map": (message(MAP), "protocol: a map without epoch"),
    "a_map_cut_off": (message(MAP, the_map()[:-3]), "protocol: cannot be parsed"),
    "a_map_of_groups": (message(MAP, the_map(), groups(9, 200)), "protocol: cannot be parsed"),
    "a_question": (copy(position=0), "ok"),
    "a_question_without_a_map": (message(COPY, field(1, b"w")), "protocol: a map without epoch"),
    "entries": (copy(entry(A_PUSH, tensors=1), entry(), entry(gone=worker()),
                     entry(A_PUSH, refused=status()), tensors=1), "ok"),
    "an_entry_before_which_rows_went": (copy(entry(A_PUSH, tensors=1, evicted=(1, 2**64 - 1)), tensors=1), "ok"),
    "rows_that_went_without_a_push": (copy(entry(evicted=(1,))), "protocol: rows that go without a push"),
    "entries_without_a_position": (copy(entry(), position=0), "protocol: entries without position"),
    "an_entry_with_tensors_that_did_not_come": (copy(entry(A_PUSH, tensors=2), tensors=1),
                                                "protocol: more tensors than the 1"),
    "an_entry_with_very_many_tensors": (copy(entry(A_PUSH, tensors=2**32 - 1), tensors=1),
                                        "protocol: more tensors than the 1"),
    "tensors_of_no_entry": (copy(entry(), tensors=1), "protocol: tensors that belong to no entry"),
    "an_entry_whose_request_has_no_client": (copy(entry(field(1, 7))), "protocol: without part or client"),
    "an_entry_refused_with_a_code_of_another_version": (copy(entry(A_PUSH, refused=status(code=999, kind=999))), "ok"),
    "very_many_entries": (copy(entry() * 2000), "ok"),
    "an_image": (with_image(), "ok"),
    "an_image_with_entries": (copy(field(5, image()), entry()), "protocol: an image with entries"),
    "an_image_of_a_part_that_it_lacks": (with_image(index=2), "protocol: part 2 of 2"),
    "an_image_of_a_table_that_cannot_be": (with_image(definition(kind=9)), "protocol: kind of table 9"),
    "an_image_of_all": (with_image(definition(**BSP), clients=(
        client(1, clock=3, floor=2, outcomes=(outcome(2), outcome(4, status(), 1))), client(2, clock=1)),
        left=(client(5),), gone=(worker(6),), step=1, pushes=(held(1), held(2, number=4))), "ok"),
    "a_held_push_of_another_version": (with_image(pushes=(held(kind=3),)), "protocol: kind of a held push"),
    "a_held_push_with_many_tensors": (with_image(pushes=(held(tensors=3),)), "protocol: tensors of a held push"),
    "a_client_twice": (with_image(clients=(client(1), client(1))), "protocol: clients out of order"),
    "an_outcome_twice": (with_image(clients=(client(1, outcomes=(outcome(2), outcome(2))),)),
                         "protocol: outcomes out of order"),
    "an_outcome_below_the_floor": (with_image(clients=(client(1, floor=3, outcomes=(outcome(2),)),)),
                                   "protocol: outcomes out of order"),
    "one_that_left_twice": (with_image(left=(client(2), client(1))), "protocol: clients that left out of order"),
    "a_worker_gone_twice": (with_image(gone=(worker(2), worker(2))), "protocol: workers that are gone out of order"),
    "a_held_push_twice": (with_image(pushes=(held(1), held(1))), "protocol: held pushes out of order"),
    "a_clock_far_beyond_the_open_step": (with_image(definition(**BSP), clients=(client(1, clock=1),
                                                                             client(2, clock=MAX)), step=1), "ok"),
    "all_clocks_far_beyond_the_open_step": (with_image(definition(**BSP), clients=(client(1, clock=MAX),), step=1),
                                            "ok"),
    "copied": (message(COPIED, field(2, the_map()), field(3, MAX), field(4, 1)), "ok"),
    "copied_refused": (message(COPIED, field(1, 1)), "ok"),
    "copied_with_an_odd_map": (message(COPIED, field(2, the_map(owner=None))), "protocol: a map without epoch"),
    "a_batch": (message(BATCH, field(1, A_PUSH), field(1, A_PULL), field(2, varint(2) + varint(1)), tensors=3), "ok"),
    "a_batch_of_nothing": (message(BATCH), "protocol: 0 requests and 0 numbers"),
    "a_batch_that_does_not_say_whose_tensors": (message(BATCH, field(1, A_PUSH), tensors=2),
                                                "protocol: 1 requests and 0 numbers"),
    "a_batch_with_more_tensors_than_came": (message(BATCH, field(1, A_PUSH), field(2, varint(3)), tensors=2),
                                            "protocol: more tensors than the 2"),
    "a_batch_with_tensors_of_no_request": (message(BATCH, field(1, A_PUSH), field(2, varint(1)), tensors=2),
                                           "protocol: tensors that belong to nothing"),
    "a_batch_with_a_request_of_no_client": (message(BATCH, field(1, A_PUSH), field(1, field(1, 7)),
                                                    field(2, varint(0) + varint(0))), "protocol: without part or client"),
    "a_batch_of_empty_requests": (message(BATCH, field(1, b"") * 3000, field(2, varint(0) * 3000)),
                                  "protocol: without part or client"),
    "a_batch_of_very_many": (message(BATCH, field(1, A_PULL) * 2000, field(2, varint(0) * 2000)), "ok"),
    "a_batch_of_too_many": (message(BATCH, field(1, A_PULL) * 4097, field(2, varint(0) * 4097)),
                            "protocol: 4097 requests, the most are 4096"),
    "a_run": (batch_of_a_run(run()), "ok"),
    "a_run_behind_another": (message(BATCH, field(1, A_PUSH), field(1, A_PULL), field(1, A_PUSH),
                                     field(2, varint(2) + varint(0) + varint(2)), run(), run(2, keys=(0, 4), numbers=(9,),
                                                                                             floors=(0,)), tensors=4), "ok"),
    "a_run_of_one": (batch_of_a_run(run(keys=(4,), numbers=(), floors=())), "protocol: of 1 pushes with 0 numbers"),
    "a_run_of_nothing": (batch_of_a_run(run(keys=(), numbers=(), floors=())), "protocol: of 0 pushes with 0 numbers"),
    "a_run_that_lacks_a_number": (batch_of_a_run(run(numbers=(1,))), "protocol: of 3 pushes with 1 numbers and 2 floors"),
    "a_run_that_lacks_a_floor": (batch_of_a_run(run(floors=(1,))), "protocol: of 3 pushes with 2 numbers and 1 floors"),
    "a_run_with_a_number_twice": (batch_of_a_run(run(numbers=(1, 0))), "protocol: with push 4, and then one 0 above"),
    "a_run_whose_numbers_overflow": (batch_of_a_run(run(numbers=(1, MAX))), "protocol: and then one 18446744073709551615 above"),
    "a_run_with_a_floor_above_its_number": (batch_of_a_run(run(floors=(3, 0))), "protocol: with floor 3 above 2"),
    "a_run_whose_floors_overflow": (batch_of_a_run(run(floors=(0, MAX))), "protocol: with floor 18446744073709551615 above 2"),
    "a_run_of_more_keys_than_came": (batch_of_a_run(run(keys=(1, 2, 2))), "protocol: of 5 keys, and 4 came"),
    "a_run_of_very_many_keys": (batch_of_a_run(run(keys=(2**32 - 1, 2**32 - 1, 6))), "protocol: of 8589934596 keys, and 4 came"),
    "a_run_of_pulls": (batch_of_a_run(run(), request=A_PULL), "protocol: that are no pushes of rows alone"),
    "a_run_of_pushes_with_a_pull": (batch_of_a_run(run(), request=A_PUSH + field(6, b"")),
                                    "protocol: that are no pushes of rows alone"),
    "a_run_that_ends_a_step": (batch_of_a_run(run(), request=A_PUSH + field(5, 3)), "protocol: that are no pushes of rows alone"),
    "a_run_without_tensors": (batch_of_a_run(run(), tensors=0), "protocol: that are no pushes of rows alone"),
    "a_run_with_one_tensor": (batch_of_a_run(run(), tensors=1), "protocol: that are no pushes of rows alone"),
    "a_run_of_no_request": (batch_of_a_run(run(1)), "protocol: a run of a request that is not there"),
    "a_run_twice": (batch_of_a_run(run(), run()), "protocol: a run of a request that is not there, or was before"),
    "a_run_of_too_many": (batch_of_a_run(run(keys=(0,) * 4092 + (1,) * 5, numbers=(1,) * 4096, floors=(0,) * 4096)),
                          "protocol: 4097 requests, the most are 4096"),
    "a_run_of_as_many_as_there_may_be": (batch_of_a_run(run(keys=(0,) * 4092 + (1,) * 4, numbers=(1,) * 4095, floors=(0,) * 4095)),
                                         "ok"),
    "a_result_for_several": (message(RESULTS, result(4095), result(0), result(7)), "ok"),
    "a_result_for_too_many": (message(RESULTS, result(4096)), "protocol: cannot stand for 4096 after it"),
    "an_error_for_several": (message(RESULTS, field(1, field(2, status()) + field(4, 2))), "protocol: cannot stand for 2 after it"),
    "values_for_several": (message(RESULTS, result(2, tensors=1), tensors=1), "protocol: cannot stand for 2 after it"),
    "a_result_for_several_whose_versions_overflow": (message(RESULTS, result(2, field(1, MAX - 1))),
                                                     "protocol: cannot stand for 2 after it"),
    "a_result_for_several_with_a_map": (message(RESULTS, result(2, field(32, the_map()))), "protocol: cannot stand for 2 after it"),
    "results": (message(RESULTS, field(1, field(1, field(1, 5)) + field(3, 1)), field(1, field(2, status())), tensors=1),
                "ok"),
    "results_of_nothing": (message(RESULTS), "ok"),
    "a_result_without_answer": (message(RESULTS, field(1, b"")), "protocol: not either an answer or an error"),
    "a_result_that_is_both": (message(RESULTS, field(1, field(1, b"") + field(2, status()))),
                              "protocol: not either an answer or an error"),
    "an_error_with_tensors": (message(RESULTS, field(1, field(2, status()) + field(3, 1)), tensors=1),
                              "protocol: not either an answer or an error"),
    "a_result_with_an_odd_map": (message(RESULTS, field(1, field(1, field(32, the_map(owner=None))))),
                                 "protocol: a map without epoch"),
    "very_many_empty_results": (message(RESULTS, field(1, field(1, b"")) * 2000), "ok"),
    "a_manifest": (manifest(a_file(), a_file(b"snapshot-1-a-1-1.safetensors"), table()), "ok"),
    "a_manifest_of_nothing": (manifest(), "ok"),
    "a_manifest_of_a_file_elsewhere": (manifest(a_file(b"../passwd")), "invalid_argument: names a file in another folder"),
    "a_manifest_of_a_file_without_a_name": (manifest(a_file(b"")), "invalid_argument: names a file in another folder"),
    "a_manifest_that_lacks_a_part": (manifest(a_file(), table(files=(0,))), "invalid_argument: has 1 of 2 parts"),
    "a_manifest_that_lacks_a_file": (manifest(a_file(), table()), "invalid_argument: names a file that it does not have"),
    "a_manifest_of_a_table_without_servers": (manifest(a_file(), table(servers=(), files=())), "invalid_argument: has 0 of 0 parts"),
    "a_manifest_of_a_table_without_a_name": (manifest(a_file(), table(name=b"")), "invalid_argument: a table's name"),
    "a_manifest_with_an_odd_definition": (manifest(a_file(), table(what=definition(mode=77))), "invalid_argument: "),
    "a_manifest_that_cannot_be_parsed": (message(MANIFEST, b"\x0b"), "invalid_argument: cannot be parsed"),
    "a_state": (message(STATE, image(clients=[client()], pushes=[held()])), "ok"),
    "a_state_that_cannot_be_parsed": (message(STATE, b"\x0b"), "protocol: "),
    "entries_for_one_that_is_to_be_the_backup": (copy(entry(A_PUSH, tensors=1), field(8, place(b"ps3")), tensors=1), "ok"),
    "a_copy_that_is_to_be_the_backup_without_a_name": (copy(field(8, place(b"")), position=0), "protocol: without a name"),
    "a_move": (move(), "ok"),
    "a_move_of_no_number": (move(number=0), "protocol: no number, or no server"),
    "a_move_to_nowhere": (move(to=b""), "protocol: no number, or no server"),
    "a_move_of_a_part_that_cannot_be": (move(index=4096), "protocol: part 4096"),
    "a_move_that_cannot_be_parsed": (message(MOVE, b"\x0b"), "protocol: cannot be parsed"),
    "parts_of_a_server": (message(LISTED, listed(), listed(index=1), listed(index=2, size=7)), "ok"),
    "parts_of_a_server_that_has_none": (message(LISTED), "ok"),
    "parts_of_no_table": (message(LISTED, listed(name=b"")), "protocol: a table's name"),
    "a_part_of_more_bytes_than_there_are": (message(LISTED, listed(size=MAX)), "protocol: 18446744073709551615 bytes"),
    "very_many_parts_of_a_server": (message(LISTED, listed() * 2000), "ok"),
    "servers_that_have_joined": (message(SERVERS, field(1, b"ps3"), field(1, b"ps4")), "ok"),
    "servers_out_of_order": (message(SERVERS, field(1, b"ps4"), field(1, b"ps3")), "protocol: not sorted, or too long"),
    "a_server_twice": (message(SERVERS, field(1, b"ps4"), field(1, b"ps4")), "protocol: not sorted, or too long"),
    "a_server_of_no_name": (message(SERVERS, field(1, b"")), "protocol: not sorted, or too long"),
    "very_many_servers": (message(SERVERS, *(field(1, b"%05d" % i) for i in range(5000))), "protocol: not sorted, or too long"),
    "a_question_for_shared_memory": (share(), "ok"),
    "a_question_for_shared_memory_of_no_name": (share(name=b""), "protocol: a table's name"),
    "a_question_with_a_short_socket": (share(socket=b"s"), "protocol: of another length"),
    "a_question_without_a_secret": (share(secret=b""), "protocol: of another length"),
    "a_question_for_shared_memory_that_cannot_be_parsed": (message(SHARE, b"\x0b"), "protocol: cannot be parsed"),
    "shared_parameters": (message(SHARED, parameter(), parameter(b"b", 2, ()), parameter(b"none", 1, (0, 7))), "ok"),
    "shared_parameters_of_nothing": (message(SHARED), "ok"),
    "a_shared_parameter_of_another_type": (message(SHARED, parameter(dtype=3)), "protocol: dtype 3"),
    "a_shared_parameter_of_a_negative_shape": (message(SHARED, parameter(shape=(MAX,))), "protocol: no parameter has"),
    "a_shared_parameter_that_is_too_large": (message(SHARED, parameter(shape=(1 << 30, 1 << 30))), "protocol: no parameter has"),
    "shared_parameters_that_are_too_large_together": (message(SHARED, *(parameter(shape=(1 << 37,)) for _ in range(3))), "ok"),
    "a_shared_parameter_of_very_many_dimensions": (message(SHARED, parameter(shape=(1,) * 65)), "protocol: no parameter has"),
    "very_many_shared_parameters": (message(SHARED, parameter(b"", 1, ()) * 3000), "ok"),
}
