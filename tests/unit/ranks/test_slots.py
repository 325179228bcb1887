"""Slots are bounded, taken in turn, and free as soon as their holder is dead."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from running import wait_for

from pytest_fsdp_comm.ranks.rank.gpus import visible_gpu_names, visible_gpus_variable
from pytest_fsdp_comm.ranks.start.slots import HeldSlots, Slots
from pytest_fsdp_comm.ranks.wire.load import extend_under_load


def take(slots, *, ranks=0, gpus=0):
    with slots.wait_for_free_slots(ranks=ranks, gpus=gpus) as (files, names):
        return HeldSlots(files), names


def start(call):
    """Runs a call in a thread, and says whether it has returned."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_the_bound_holds_whatever_is_asked_for(tmp_path):
    bound, living, most = 5, 0, 0
    lock = threading.Lock()

    def use(ranks):
        nonlocal living, most
        held, _ = take(Slots(tmp_path, ranks=bound, gpus=()), ranks=ranks)
        with lock:
            living += ranks
            most = max(most, living)
        time.sleep(0.01)
        with lock:
            living -= ranks
        held.release()

    with ThreadPoolExecutor(8) as executor:
        list(executor.map(use, [1, 2, 5, 3, 1, 4, 2, 5, 1, 1, 3, 2] * 2))
    assert living == 0
    assert 3 <= most <= bound


def test_a_large_test_is_not_overtaken(tmp_path):
    slots = Slots(tmp_path, ranks=2, gpus=())
    first, _ = take(slots, ranks=1)
    order = []
    large = start(lambda: order.append(("large", take(slots, ranks=2))))
    wait_for(slots.are_wanted)
    small = start(lambda: order.append(("small", take(slots, ranks=1))))
    small.join(0.2)
    assert not order, "the small one would fit, but came later"
    first.release()
    large.join(extend_under_load(20))
    order[0][1][0].release()
    small.join(extend_under_load(20))
    assert [name for name, _ in order] == ["large", "small"]


def test_waiting_is_seen_by_those_who_hold_slots(tmp_path):
    slots = Slots(tmp_path, ranks=1, gpus=())
    held, _ = take(slots, ranks=1)
    assert not slots.are_wanted()
    waiting = start(lambda: take(slots, ranks=1))
    wait_for(slots.are_wanted)
    held.release()
    waiting.join(extend_under_load(20))
    assert not waiting.is_alive()
    assert not slots.are_wanted()
    assert not Slots(tmp_path / "none", ranks=1, gpus=()).are_wanted()


def test_a_forked_child_keeps_no_slots(tmp_path):
    slots = Slots(tmp_path, ranks=1, gpus=())
    held, _ = take(slots, ranks=1)
    # As a fork does: the copy shares the lock.
    copies = [os.dup(descriptor) for descriptor in held._descriptors]
    held.release()
    again, _ = take(slots, ranks=1)
    again.release()
    for copy in copies:
        os.close(copy)


def test_gpus_are_leased_to_one_holder_each(tmp_path):
    names = ("3", "MIG-GPU-5/1/0", "GPU-8932f937")
    here, there = (Slots(tmp_path, ranks=None, gpus=names) for _ in range(2))
    first, gpus = take(here, ranks=2, gpus=2)
    assert gpus == ("3", "MIG-GPU-5/1/0")
    second, gpus = take(there, ranks=1, gpus=1)
    assert gpus == ("GPU-8932f937",)
    waiting = start(lambda: take(there, ranks=1, gpus=1))
    waiting.join(0.2)
    assert waiting.is_alive()
    second.release()
    waiting.join(extend_under_load(20))
    assert not waiting.is_alive()
    first.release()


def test_nothing_is_waited_for_that_can_never_be(tmp_path):
    slots = Slots(tmp_path, ranks=None, gpus=("0",))
    with slots.wait_for_free_slots(ranks=100, gpus=2) as (files, names):
        assert names == ()
        assert files == ()


@pytest.mark.parametrize(
    ("environment", "count", "names"),
    [
        ({}, 0, ()),
        ({}, 3, ("0", "1", "2")),
        ({"CUDA_VISIBLE_DEVICES": "3, 1"}, 2, ("3", "1")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-1"}, 2, ("GPU-8932f937", "GPU-1")),
        ({"CUDA_VISIBLE_DEVICES": "2,-1,3"}, 1, ("2",)),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, ()),
        ({"HIP_VISIBLE_DEVICES": "7,6", "CUDA_VISIBLE_DEVICES": "0"}, 2, ("7", "6")),
    ],
)
def test_gpus_are_named_as_the_environment_lists_them(environment, count, names):
    assert visible_gpu_names(environment, count) == names


def test_the_variable_of_hip_is_used_where_it_is_set():
    assert visible_gpus_variable({"HIP_VISIBLE_DEVICES": ""}) == "HIP_VISIBLE_DEVICES"
    assert visible_gpus_variable({}) == "CUDA_VISIBLE_DEVICES"
