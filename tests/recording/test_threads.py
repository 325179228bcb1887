"""Collectives of threads and future callbacks; `test_witness` covers unrecorded ones."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from oracle import gloo_and_fake, lines, witnessed
from torch import nn

from pytest_fsdp_comm import CommMode
from pytest_fsdp_comm.ranks.wire.load import extend_under_load

ws2 = pytest.mark.distributed(world_size=2)


def on_a_thread(work):
    thread = threading.Thread(target=work, name="loader")
    thread.start()
    thread.join()


class Reduces(nn.Module):
    def forward(self, x):
        dist.all_reduce(x)
        return x


@gloo_and_fake(2)
def test_what_a_thread_sends_serves_no_module(comm_mode):
    model = nn.Sequential(Reduces())

    def send():
        dist.all_reduce(torch.ones(2))
        on_a_thread(lambda: (model(torch.ones(4)), dist.barrier()))

    witnessed(comm_mode, model, send, profiler=False)
    assert lines(comm_mode) == [
        "outside - all_reduce[world] 8 < -",
        "forward - all_reduce[world] 16 < 0",
        "outside - barrier[world] 0 < -",
    ]
    assert comm_mode.recording.gaps == ()


@ws2
def test_sends_and_receives_of_threads_are_recorded(comm_mode, dist_info):
    def exchange():
        tensor = torch.ones(4)
        dist.send(tensor, 1) if dist_info.rank == 0 else dist.recv(tensor, 0)

    with comm_mode:
        on_a_thread(exchange)
    kind = "send" if dist_info.rank == 0 else "recv"
    assert lines(comm_mode) == [f"outside - {kind}[world] 16 < -"]


class OwnRun(threading.Thread):
    def run(self):
        dist.all_reduce(torch.ones(4))


def by_executor():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dist.all_reduce, torch.ones(4)).result()


def by_timer():
    timer = threading.Timer(0, lambda: dist.all_reduce(torch.ones(4)))
    timer.start()
    timer.join()


def by_own_run():
    thread = OwnRun()
    thread.start()
    thread.join()


def by_a_thread_of_a_thread():
    on_a_thread(lambda: on_a_thread(lambda: dist.all_reduce(torch.ones(4))))


@gloo_and_fake(2)
@pytest.mark.parametrize("start", [by_executor, by_timer, by_own_run, by_a_thread_of_a_thread])
def test_a_thread_is_followed_however_it_is_started(comm_mode, start):
    witnessed(comm_mode, None, start, profiler=False)
    assert lines(comm_mode) == ["outside - all_reduce[world] 16 < -"]


@gloo_and_fake(2)
def test_nested_recordings_follow_a_thread_each(comm_mode):
    inner = CommMode()
    with comm_mode:
        on_a_thread(lambda: dist.all_reduce(torch.ones(4)))
        with inner:
            on_a_thread(lambda: dist.all_reduce(torch.ones(4)))
        on_a_thread(lambda: dist.all_reduce(torch.ones(4)))
    assert len(inner.events) == 1
    assert len(comm_mode.events) == 3


@ws2
def test_thread_before_recording_is_not_counted(comm_mode):
    on_a_thread(lambda: dist.all_reduce(torch.ones(4)))
    witnessed(comm_mode, None, lambda: dist.all_reduce(torch.ones(2)))
    on_a_thread(lambda: dist.all_reduce(torch.ones(4)))
    assert comm_mode.recording.notes == ()


@ws2
@pytest.mark.parametrize("register", ["then", "add_done_callback"])
def test_collective_in_future_callback_is_recorded(comm_mode, register):
    done = threading.Event()

    def chain():
        done.clear()

        def reduce_again(_future):
            dist.all_reduce(torch.ones(3))
            done.set()

        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        getattr(future, register)(reduce_again)
        assert done.wait(timeout=extend_under_load(30))

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
def test_a_thread_that_outlives_the_block_is_no_gap(comm_mode):
    group = dist.new_group()
    for pause_s in (0, 0.002, 0.004):
        begun = threading.Event()

        def send(begun=begun):
            for number in range(80):
                dist.all_reduce(torch.ones(2), group=group)
                if number == 5:
                    begun.set()

        thread = threading.Thread(target=send, name="late")
        with comm_mode:
            thread.start()
            begun.wait(extend_under_load(20))
            time.sleep(pause_s)
        thread.join()
        assert comm_mode.recording.gaps == ()
        assert 5 < comm_mode.counts("all_reduce") <= 80
        notes = comm_mode.recording.notes
        assert not notes or notes == (
            "a thread was still communicating when the block ended; its later collectives are not "
            "recorded",
        )
