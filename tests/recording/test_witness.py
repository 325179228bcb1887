"""Gaps for collectives that only the flight recorder has, and for nothing else."""

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from models import Model, shard, step
from torch_facts import needs_flight_recorder

from pytest_fsdp_comm import UnseenCollectivesWarning
from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.recording import active, kernels

ws2 = pytest.mark.distributed(world_size=2)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def data(numel=4, dtype=torch.float32):
    return torch.ones(numel).to(dtype)


def gaps(comm_mode, work, model=None):
    """The gaps of a block, each of which is a note and part of the warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnseenCollectivesWarning)
        with comm_mode if model is None else comm_mode(model):
            work()
    recording = comm_mode.recording
    texts = [gap.text for gap in recording.gaps]
    assert {gap.kind for gap in recording.gaps} <= {"unseen"}
    assert [note for note in recording.notes if note != MODE_NOTE] == texts
    said = [str(warning.message) for warning in caught]
    assert said == (
        [f"comm_mode: the recording is incomplete: {'; '.join(texts)}"] if texts else []
    )
    assert all(warning.filename == __file__ for warning in caught)
    return texts


class Waiting:
    """A thread that is running before the recording begins."""

    def __init__(self, work):
        self._go = threading.Event()
        self._thread = threading.Thread(target=self._run, args=[work], name="loader")
        self._thread.start()

    def _run(self, work):
        self._go.wait()
        work()

    def __call__(self):
        self._go.set()
        self._thread.join()


@pytest.fixture
def without_kernels(monkeypatch):
    """Only this thread is recorded, as if torch had moved a function that kernels need."""
    monkeypatch.setattr(
        kernels, "register_collective_kernels", lambda: "this torch has no torch._C.moved"
    )


MODE_NOTE = (
    "this torch has no torch._C.moved, so a dispatch mode records only this thread; "
    "collectives of other threads are missing, or listed only by torch's flight recorder"
)


# Collectives that must be a gap.


@pytest.mark.upstream
@needs_flight_recorder
@ws2
@pytest.mark.usefixtures("without_kernels")
def test_a_thread_that_was_running_before_is_named(comm_mode):
    group = dist.new_group([0, 1], group_desc="checkpoints")

    def send():
        dist.all_reduce(data(), group=group)
        dist.all_reduce(data(), group=group)
        dist.barrier()

    waiting = Waiting(send)

    def work():
        dist.all_reduce(data(2))
        waiting()

    assert gaps(comm_mode, work) == [
        "3 collectives sent on other threads, whose calls were not recorded: barrier over world, "
        "2 x all_reduce of 16 B float32 over checkpoints"
    ]
    assert len(comm_mode.events) == 1


@pytest.mark.upstream
@needs_flight_recorder
@ws2
def test_what_is_sent_below_the_dispatcher_is_named(comm_mode, device_mesh):
    mesh = device_mesh()
    backend = mesh.get_group()._get_backend(torch.device("cpu"))
    model = shard(Model(), mesh)

    def work():
        step(model)
        backend.allreduce([data(3, torch.bfloat16)]).wait()

    assert gaps(comm_mode, work, model) == [
        "1 collective sent below torch's dispatcher (by a method of the backend, or from C++): "
        "all_reduce of 6 B bfloat16 over dp"
    ]


@needs_flight_recorder
@ws2
def test_owners_are_known_while_calls_are_recorded(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.all_reduce(data())
    with warnings.catch_warnings(action="ignore"), comm_mode(model):
        step(model)
        owners = [event.owner or "" for event in comm_mode.events]
        numbered = dict(zip(itertools.count(2), owners, strict=False))
        assert active.owners_so_far() == {("0", seq): owner for seq, owner in numbered.items()}
        # From the first mismatch on, the numbers are unknown.
        backend.allreduce([data(3)]).wait()
        step(model)
        assert len(active.owners_so_far()) == len(owners) > 4
    assert active.owners_so_far() == {}


@ws2
def test_call_below_dispatcher_on_block_thread_is_gap(comm_mode):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    def work():
        thread = threading.Thread(target=lambda: backend.allreduce([data()]).wait())
        thread.start()
        thread.join()

    (text,) = gaps(comm_mode, work)
    assert text.startswith("1 collective sent on other threads, ")
    assert text.endswith(", whose calls were not recorded: all_reduce of 16 B float32 over world")


@ws2
def test_call_equal_to_recorded_call_is_still_gap(comm_mode):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    def work():
        dist.all_reduce(data())
        backend.allreduce([data()]).wait()
        dist.all_reduce(data())

    (text,) = gaps(comm_mode, work)
    assert text.endswith("C++): all_reduce of 16 B float32 over world")
    assert text.startswith("1 collective ")


@ws2
@pytest.mark.usefixtures("without_kernels")
def test_thread_sending_before_recorded_call_is_gap(comm_mode):
    waiting = Waiting(lambda: dist.all_reduce(data()))

    def work():
        waiting()
        dist.all_reduce(data())

    (text,) = gaps(comm_mode, work)
    assert text.startswith("1 collective sent on other threads, ")


@ws2
def test_unknown_operation_is_recorded_as_sent(comm_mode):
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    library.define("odd_reduce(Tensor input, str group_name) -> Tensor")

    def reduce(tensor, _group):
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([tensor]).wait()
        return tensor.clone()

    library.impl("odd_reduce", reduce, "CompositeExplicitAutograd")
    name = dist.group.WORLD.group_name
    work = lambda: torch.ops._c10d_functional.odd_reduce(data(), name)  # noqa: E731  # one line
    assert gaps(comm_mode, work) == []
    assert [event.kind for event in comm_mode.events] == ["unknown:odd_reduce"]
    library._destroy()


@ws2
def test_the_method_of_a_process_group_is_recorded(comm_mode):
    assert gaps(comm_mode, lambda: dist.group.WORLD.allreduce([data()]).wait()) == []
    assert len(comm_mode.events) == 1


@ws2
def test_many_kinds_are_not_all_listed(comm_mode):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    def work():
        for numel in range(1, 7):
            backend.allreduce([data(numel)]).wait()

    (text,) = gaps(comm_mode, work)
    assert text.startswith("6 collectives ")
    assert text.endswith("all_reduce of 16 B float32 over world and 2 more kinds")


@ws2
def test_a_group_that_is_gone_has_its_description(comm_mode):
    def work():
        group = dist.new_group([0, 1], group_desc="short-lived")
        group._get_backend(torch.device("cpu")).allreduce([data()]).wait()
        dist.destroy_process_group(group)

    (text,) = gaps(comm_mode, work)
    assert text.endswith("over short-lived")


@ws2
def test_an_exception_is_not_replaced_by_the_warning(comm_mode):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    def fail():
        with comm_mode:
            backend.allreduce([data()]).wait()
            raise ZeroDivisionError

    # Warnings are errors here.
    with pytest.raises(ZeroDivisionError):
        fail()
    (gap,) = comm_mode.recording.gaps
    assert gap.text.startswith("1 collective sent below torch's dispatcher")


@ws2
def test_a_merged_profile_names_the_ranks_of_a_gap(comm_mode, dist_info):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    gaps(comm_mode, lambda: backend.allreduce([data()]).wait())
    (of_both,) = comm_mode.merged_profile().gaps
    assert of_both == comm_mode.recording.gaps[0]
    alone = [dist.new_group([rank]) for rank in range(2)][dist_info.rank]
    backend = alone._get_backend(torch.device("cpu"))
    gaps(comm_mode, lambda: dist_info.rank == 0 or backend.allreduce([data()]).wait())
    (of_one,) = comm_mode.merged_profile().gaps
    assert of_one.ranks == (1,)


# Collectives that must not. Warnings are errors, so no other test on gloo may have a gap either.


def lists():
    rank = dist.get_rank()
    dist.all_gather([data(), data()], data())
    dist.reduce_scatter(data(), [data(), data()])
    # A total that equals another's size.
    dist.reduce_scatter(data(), [data(), data()])
    dist.all_reduce(data(8))
    dist.all_to_all([data(), data()], [data(), data()])
    for source in range(2):
        mine = [data(), data()] if rank == source else None
        dist.scatter(data(), mine, src=source)
        dist.gather(data(), mine, dst=source)
        dist.reduce(data(), source)
        dist.broadcast(data(), source)


def odd_sizes():
    rank = dist.get_rank()
    # Rank 0 sends nothing, and rank 1 receives nothing.
    mine, others = ([0, 0], [0, 3]) if rank == 0 else ([3, 0], [0, 0])
    dist.all_to_all_single(data(sum(others)), data(sum(mine)), others, mine)
    dist.all_reduce(data(0))
    dist.all_reduce(data().to_sparse())
    dist.all_reduce(torch.ones(4, 4).t())
    dist.all_reduce(torch.tensor(1.0))


def dtypes():
    for dtype in (
        torch.int8,
        torch.uint8,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int64,
    ):
        dist.all_gather_into_tensor(data(8, dtype), data(4, dtype))
    dist.broadcast(data(4, torch.bool), 0)
    for dtype in (torch.complex64, torch.complex128):
        dist.all_reduce(data(4, dtype))
        dist.all_gather_into_tensor(data(8, dtype), data(4, dtype))
        dist.reduce_scatter_tensor(data(4, dtype), data(8, dtype))
        funcol.all_gather_tensor(data(4, dtype), 0, dist.group.WORLD).wait()


def failures():
    # Some raise before they are issued, others, which are recorded, where they are waited for.
    for tensor in (data().to(torch.float8_e4m3fn), data(4, torch.int16), data().to("meta")):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            dist.all_reduce(tensor)
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(data().to_sparse(), op=dist.ReduceOp.MAX)
    with contextlib.suppress(RuntimeError):
        dist.all_gather_into_tensor(data(7), data())
    dist.all_reduce(data())


def groups():
    pairs = [dist.new_group([0, 1]) for _ in range(2)]
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for group in (*pairs, alone):
        dist.all_reduce(data(), group=group)
    dist.destroy_process_group(pairs[0])
    dist.all_reduce(data(), group=pairs[1])


@ws2
@pytest.mark.parametrize("work", [*(lists, odd_sizes, dtypes, failures, groups)])
def test_what_was_recorded_is_no_gap(comm_mode, work):
    assert gaps(comm_mode, work) == []
    assert comm_mode.events


@ws2
def test_what_was_sent_before_and_after_is_no_gap(comm_mode):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.allreduce([data()]).wait()
    assert gaps(comm_mode, lambda: dist.all_reduce(data(2))) == []
    backend.allreduce([data()]).wait()
    assert gaps(comm_mode, lambda: dist.all_reduce(data(2))) == []


@ws2
def test_group_recreated_in_block_is_checked(comm_mode):
    dist.all_reduce(data())
    store = dist.distributed_c10d._get_default_store()

    def work():
        rank = dist.get_rank()
        dist.all_reduce(data())
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2
        )
        for _ in range(3):
            dist.all_reduce(data())
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([data()]).wait()

    (text,) = gaps(comm_mode, work)
    assert text.startswith("1 collective ")


@ws2
def test_a_full_flight_recorder_is_a_note_and_no_gap(comm_mode):
    def work():
        for _ in range(2001):
            dist.all_reduce(data(1))

    with comm_mode:
        work()
    assert comm_mode.recording.gaps == ()
    (note,) = comm_mode.recording.notes
    assert note.startswith("only the last 2000 collectives were checked")
    # It is still full, of what was before.
    assert gaps(comm_mode, lambda: dist.all_reduce(data())) == []


ALONE = """
import torch, torch.distributed as dist, sys
from pytest_fsdp_comm import CommMode

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
comm_mode = CommMode()
with comm_mode:
    dist.all_reduce(torch.ones(4))
    dist.barrier()
assert len(comm_mode.events) == 2
assert comm_mode.recording.gaps == ()
print(*comm_mode.recording.notes, end="")
"""


@pytest.mark.parametrize(
    ("environment", "note"),
    [
        ({"TORCH_FR_BUFFER_SIZE": "0"}, ""),
        pytest.param(
            {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
            "nothing was checked against torch's flight recorder, which names no groups under "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL",
            marks=pytest.mark.release,
        ),
    ],
    ids=["off", "detail"],
)
def test_without_a_witness_nothing_is_a_gap(environment, note):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
        # It takes 4 s of processor time, a fourth of it at its end: minutes on a busy machine.
        timeout=extend_under_load(600),
    )
    assert done.stdout == note


@pytest.mark.distributed(world_size=2, backend="fake")
def test_the_fake_group_has_no_witness(comm_mode):
    assert gaps(comm_mode, lambda: dist.all_reduce(data())) == []
