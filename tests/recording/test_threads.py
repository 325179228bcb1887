"""Threads and futures: what is recorded of them, and what is said of the rest."""

import threading

import pytest
import torch
import torch.distributed as dist
from models import Block, step
from oracle import lines, witnessed

from pytest_fsdp_comm import UnseenCollectivesWarning

ws2 = pytest.mark.distributed(world_size=2)


def on_a_thread(work):
    thread = threading.Thread(target=work, name="loader")
    thread.start()
    thread.join()


@ws2
def test_collectives_of_a_thread_are_said_to_be_missing(comm_mode):
    def send():
        dist.all_reduce(torch.ones(4))
        dist.barrier()

    def record():
        with comm_mode:
            dist.all_reduce(torch.ones(2))
            on_a_thread(send)

    with pytest.warns(UnseenCollectivesWarning) as caught:
        record()
    assert len(comm_mode.events) == 1
    (warning,) = caught
    assert "2 collectives of other threads are missing" in str(warning.message)
    assert "all_reduce 1, barrier 1" in str(warning.message)
    assert warning.filename == __file__


@ws2
def test_collectives_of_threads_before_the_recording_are_not_counted(comm_mode):
    on_a_thread(lambda: dist.all_reduce(torch.ones(4)))
    witnessed(comm_mode, None, lambda: dist.all_reduce(torch.ones(2)))
    on_a_thread(lambda: dist.all_reduce(torch.ones(4)))
    assert comm_mode.recording.notes == ()


@ws2
def test_an_exception_is_not_replaced_by_the_warning(comm_mode):
    def fail():
        with comm_mode:
            on_a_thread(lambda: dist.all_reduce(torch.ones(4)))
            raise ZeroDivisionError

    # Warnings are errors here.
    with pytest.raises(ZeroDivisionError):
        fail()
    assert "1 collectives of other threads" in comm_mode.recording.notes[0]


@ws2
@pytest.mark.parametrize("register", ["then", "add_done_callback"])
def test_collectives_in_callbacks_of_futures_are_recorded(comm_mode, register):
    done = threading.Event()

    def chain():
        done.clear()

        def reduce_again(_future):
            dist.all_reduce(torch.ones(3))
            done.set()

        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        getattr(future, register)(reduce_again)
        assert done.wait(timeout=30)

    witnessed(comm_mode, None, chain, profiler=False)
    assert lines(comm_mode) == [
        "outside - all_reduce[world] 8 < -",
        "outside - all_reduce[world] 12 < -",
    ]


@ws2
def test_a_callback_after_the_recording_is_left_alone(comm_mode):
    future = torch.futures.Future()
    called = []
    with comm_mode:
        dist.all_reduce(torch.ones(2))
        future.add_done_callback(lambda _: called.append(dist.all_reduce(torch.ones(3))))
    future.set_result(None)
    assert called
    assert len(comm_mode.events) == 1


@ws2
def test_torch_is_as_before_after_a_recording(comm_mode):
    before = torch._C.Future.then, torch._C.Future.add_done_callback
    with comm_mode:
        step(Block())
    assert (torch._C.Future.then, torch._C.Future.add_done_callback) == before
