"""Objects of a class are listed from another thread, as reports of hanging tests do."""

import threading

from torch import nn

from pytest_fsdp_comm.recording.mesh_axes import list_instances


def test_listing_leaves_unfinished_tuples_intact():
    is_done = threading.Event()

    def list_repeatedly():
        while not is_done.is_set():
            list_instances(nn.Module)

    thread = threading.Thread(target=list_repeatedly)
    thread.start()
    try:
        # CPython changes the size of such a tuple at the end, which needs the only reference to it.
        for _ in range(5_000):
            tuple(number for number in range(200))
    finally:
        is_done.set()
        thread.join()


class Proxy:
    """Fails if its class is asked for, as some proxies do."""

    @property
    def __class__(self):
        raise AssertionError


def test_listing_asks_no_proxy_for_its_class():
    proxies = [Proxy()]
    module = nn.Linear(1, 1)
    listed = list_instances(nn.Linear)
    assert any(entry is module for entry in listed)
    assert proxies
