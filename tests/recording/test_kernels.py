"""The kernels of the process, and the recordings that get their calls."""

import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from models import ACTIVATION_NBYTES, WIDTH, Model, shard
from oracle import gloo_and_fake, lines
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pytest_fsdp_comm import CommMode
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.recording.active import entered_recorders
from pytest_fsdp_comm.recording.operations import NAMESPACES, find_operation

KEY = "BackendSelect"

pytestmark = pytest.mark.filterwarnings("ignore::pytest_fsdp_comm.UnseenCollectivesWarning")


def sent(numel=1):
    """An all-reduce with a size that identifies it."""
    dist.all_reduce(torch.ones(numel))


def sizes(comm_mode):
    return [event.nbytes // 4 for event in comm_mode.events]


def owners(comm_mode):
    return [(event.phase.value, event.owner) for event in comm_mode.events]


def registered():
    return sorted(
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(KEY)
        if name.partition("::")[0] in NAMESPACES
    )


def kernels_of_communicating_operations():
    """Of each operation of torch's own that communicates, whether it has a kernel there."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace in {"c10d", "_c10d_functional", "_dtensor"}:
            operation = getattr(getattr(torch.ops, namespace), name).default
            if find_operation(operation) is not None:
                qualified = operation.name()
                found[qualified] = torch._C._dispatch_has_kernel_for_dispatch_key(qualified, KEY)
    assert len(found) > 30
    return found


@pytest.fixture
def older():
    """A thread that runs before any block; calls functions, and waits for them."""
    with ThreadPoolExecutor(1, "older") as pool:
        pool.submit(int).result()
        yield lambda work: pool.submit(work).result(timeout=extend_under_load(60))


@pytest.mark.upstream
@gloo_and_fake(2)
def test_kernels_are_registered_once_and_stay(comm_mode):
    with comm_mode:
        assert all(kernels_of_communicating_operations().values())
    before = registered()
    with comm_mode:
        sent()
    assert registered() == before
    assert all(kernels_of_communicating_operations().values())


@gloo_and_fake(2)
def test_idle_kernels_change_no_result(comm_mode):
    def send():
        summed = torch.ones(3)
        dist.all_reduce(summed)
        gathered = [torch.zeros(3) for _ in range(2)]
        dist.all_gather(gathered, summed)
        functional = funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        return [summed.tolist(), torch.cat(gathered).tolist(), functional.tolist()]

    before = send()
    with comm_mode:
        inside = send()
    assert before == inside == send()
    assert len(comm_mode.events) == 3


@pytest.mark.distributed(world_size=2, backend="fake")
def test_operation_without_kernel_raises_torchs_error(comm_mode):
    with comm_mode, pytest.raises(NotImplementedError, match="Could not run 'symm_mem::nccl_put'"):
        torch.ops.symm_mem.nccl_put(torch.ones(2), 1)
    assert comm_mode.events == ()


@pytest.mark.distributed(world_size=2, backend="fake")
@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_old_operation_name_counts_as_new_one(comm_mode, grad_mode):
    with grad_mode(), comm_mode:
        torch.ops.c10d_functional.all_reduce(torch.ones(4), "sum", "", [0, 1], 2)
    (event,) = comm_mode.events
    assert (event.op, event.axis) == ("_c10d_functional.all_reduce", "world")
    assert (event.nbytes_sent, event.nbytes_received) == (16, 16)


@gloo_and_fake(2)
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_ends_the_recording(comm_mode, kind):
    def fail():
        with comm_mode:
            sent(2)
            raise kind

    with pytest.raises(kind):
        fail()
    assert sizes(comm_mode) == [2]
    sent(3)
    with comm_mode:
        sent(4)
    assert sizes(comm_mode) == [4]


@gloo_and_fake(2)
def test_nested_recordings_have_events_of_their_time(comm_mode):
    first, second = CommMode(), CommMode()
    with first:
        sent(1)
        with second:
            sent(2)
            with comm_mode:
                sent(3)
            sent(4)
        sent(5)
    sent(6)
    assert sizes(first) == [1, 2, 3, 4, 5]
    assert sizes(second) == [2, 3, 4]
    assert sizes(comm_mode) == [3]
    assert first.recording.gaps == second.recording.gaps == comm_mode.recording.gaps == ()


@pytest.mark.distributed(world_size=2, backend="fake")
def test_block_left_on_other_thread_is_over(older, device_mesh):
    model = shard(Model(blocks=1), device_mesh())
    left, later = CommMode(trace_operations=False), CommMode(trace_operations=False)
    left(model).__enter__()
    older(lambda: left.__exit__(None, None, None))
    assert entered_recorders() == ()
    with later(model):
        with left(model):
            assert len(entered_recorders()) == 2
        assert len(entered_recorders()) == 1
        model(torch.ones(2, WIDTH))
    assert entered_recorders() == ()
    assert [event.owner for event in later.events] == ["", "layers.0"]


@gloo_and_fake(2)
def test_what_an_older_thread_sends_has_no_owner(comm_mode, older):
    model = nn.Linear(WIDTH, WIDTH)
    with comm_mode(model):
        sent(1)
        older(lambda: sent(2))
        older(dist.barrier)
    assert lines(comm_mode) == [
        "outside - all_reduce[world] 4 < -",
        "outside - all_reduce[world] 8 < -",
        "outside - barrier[world] 0 < -",
    ]
    assert {event.role for event in comm_mode.events} == {None}
    assert comm_mode.recording.gaps == ()


@gloo_and_fake(2)
def test_older_thread_during_unit_has_no_owner(comm_mode, older, device_mesh):
    model = shard(Model(), device_mesh())
    model.layers[0].register_forward_pre_hook(lambda *_: older(lambda: sent(3)))
    model.layers[0].up.register_full_backward_hook(lambda *_: older(lambda: sent(5)))
    with comm_mode(model):
        model(torch.ones(2, WIDTH)).sum().backward()
    of_thread = [event for event in comm_mode.events if event.kind == "all_reduce"]
    assert [(event.nbytes, event.owner, event.issued_in) for event in of_thread] == [
        (12, None, None),
        (20, None, None),
    ]
    assert len(comm_mode.events) == 8 + 2


@gloo_and_fake(2)
def test_two_threads_record_at_the_same_time(older, device_mesh):
    ours, theirs = CommMode(), CommMode()
    here, there = shard(Model(), device_mesh()), shard(Model(1), device_mesh())
    x = torch.ones(2, WIDTH)
    ours(here).__enter__()
    older(lambda: theirs(there).__enter__())
    here_loss = here(x).sum()
    there_loss = older(lambda: there(x).sum())
    here_loss.backward()
    older(there_loss.backward)
    ours.__exit__(None, None, None)
    older(lambda: theirs.__exit__(None, None, None))
    step = [
        [("forward", name) for name in ("", "layers.0", "layers.1")],
        [("backward", name) for name in ("layers.1", "layers.0", "layers.1", "layers.0", "")],
    ]
    step_there = [
        [("forward", name) for name in ("", "layers.0")],
        [("backward", name) for name in ("layers.0", "layers.0", "")],
    ]

    def foreign(events):
        return [(phase, None) for phase, _ in events]

    assert owners(ours) == [*step[0], *foreign(step_there[0]), *step[1], *foreign(step_there[1])]
    assert owners(theirs) == [*foreign(step[0]), *step_there[0], *foreign(step[1]), *step_there[1]]


@gloo_and_fake(2)
def test_thread_outliving_block_is_gap_of_later_block(comm_mode):
    first = CommMode()
    with first:
        pool = ThreadPoolExecutor(1, "left")
        pool.submit(sent, 1).result(timeout=extend_under_load(60))
    with comm_mode:
        sent(2)
        pool.submit(sent, 3).result(timeout=extend_under_load(60))
    pool.shutdown()
    assert sizes(first) == [1]
    assert sizes(comm_mode) == [2]
    assert comm_mode.recording.gaps[-1].text == (
        "thread 'left_0' from an earlier block sent c10d.allreduce_, which is not recorded; join "
        "the thread in the block that starts it"
    )


@gloo_and_fake(2)
def test_child_forked_in_block_does_not_affect_it(comm_mode):
    with comm_mode:
        sent(1)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                if dist.get_backend() == "fake":  # gloo has no threads here
                    sent(2)
                    assert sizes(comm_mode) == [1, 2]
                comm_mode.__exit__(None, None, None)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        sent(3)
    assert sizes(comm_mode) == [1, 3]
    assert comm_mode.recording.gaps == ()


class Foreign:
    """A library that registers a kernel at the same key as ours."""

    def __init__(self):
        self.called = 0
        self._library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, once a process, that it replaces a kernel
            self._library.impl("allreduce_", self._pass, KEY, with_keyset=True)

    def _pass(self, keyset, *args):
        self.called += 1
        after = keyset & torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        return torch.ops.c10d.allreduce_.default.redispatch(after, *args)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._library._destroy()


@gloo_and_fake(2)
def test_kernel_registered_before_block_is_named(comm_mode):
    with Foreign() as foreign:
        try:
            with comm_mode:
                sent(2)
        except FsdpCommError as refused:
            assert "c10d::allreduce_" in str(refused)  # noqa: PT017  # either is right
        else:
            assert foreign.called == 1
            assert sizes(comm_mode) == [2]
            assert comm_mode.recording.gaps == ()
            (note,) = comm_mode.recording.notes
            assert note.startswith("another library has registered a kernel for c10d::allreduce_")
            assert note.endswith(
                "reads values" if dist.get_backend() == "fake" else "flight recorder"
            )
        called = foreign.called
        sent(3)
        assert foreign.called == called + 1


@gloo_and_fake(2)
def test_kernel_registered_between_blocks_is_named(comm_mode):
    with comm_mode:
        sent(1)
    with Foreign() as foreign:
        with comm_mode:
            sent(2)
            dist.barrier()
        assert foreign.called == 1
        assert [event.kind for event in comm_mode.events] == ["all_reduce", "barrier"]
        assert comm_mode.recording.gaps == ()
        (note,) = comm_mode.recording.notes
        assert note.startswith("another library has registered a kernel for c10d::allreduce_")
    with comm_mode:
        sent(3)
    assert sizes(comm_mode) == [3]
    assert comm_mode.recording.notes == ()


@gloo_and_fake(2)
def test_kernel_registered_in_block_is_gap(comm_mode):
    with comm_mode:
        sent(1)
        foreign = Foreign()
        sent(2)
    with foreign:
        assert foreign.called == 1
    told_or_recorded(comm_mode, [1, 2])


@pytest.mark.distributed(world_size=2)
def test_kernel_added_and_removed_in_block_is_gap(comm_mode):
    with comm_mode:
        sent(1)
        with Foreign() as foreign:
            sent(2)
        sent(3)
    assert foreign.called == 1
    told_or_recorded(comm_mode, [1, 2, 3])


@pytest.mark.distributed(world_size=2, backend="fake")
def test_removed_operation_does_not_stop_a_block(comm_mode):
    def defined(name):
        library = torch.library.Library("c10d", "FRAGMENT")
        library.define(f"{name}(Tensor own) -> Tensor")
        library.impl(name, torch.clone, "CPU")
        return library

    for name in ("first_of_two", "second_of_two"):
        library = defined(name)
        with comm_mode:
            getattr(torch.ops.c10d, name)(torch.ones(1))
        library._destroy()
        assert [event.kind for event in comm_mode.events] == [f"unknown:{name}"]
        with comm_mode:
            sent()
        assert sizes(comm_mode) == [1]


def told_or_recorded(comm_mode, expected):
    """Asserts that everything was recorded, or that a gap names the missing operation."""
    texts = [gap.text for gap in comm_mode.recording.gaps]
    assert sizes(comm_mode) == expected or "allreduce" in "".join(texts).replace("_", "")


def parallel(device_mesh):
    model, mesh = Model(), device_mesh(tp=2)
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


ENTRIES = {
    "Tensor.backward": lambda loss, _: loss.backward(),
    "torch.autograd.backward": lambda loss, _: torch.autograd.backward([loss]),
    "torch.autograd.grad": torch.autograd.grad,
    "create_graph": lambda loss, inputs: torch.autograd.grad(loss, inputs, create_graph=True),
}


@gloo_and_fake(2)
@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_to_the_engine_gives_owners(comm_mode, device_mesh, name):
    model = parallel(device_mesh)
    x = torch.ones(2, WIDTH, requires_grad=True)
    with comm_mode(model):
        ENTRIES[name](model(x).sum(), [x, *model.parameters()])
    assert lines(comm_mode) == [
        *(
            f"forward layers.{n}.down all_reduce[tp] {ACTIVATION_NBYTES} < layers.{n}.down"
            for n in (0, 1)
        ),
        *(
            f"backward layers.{n}.up all_reduce[tp] {ACTIVATION_NBYTES} < layers.{n}.up"
            for n in (1, 0)
        ),
    ]


class Reduced(torch.autograd.Function):
    """Reduces its gradient, and that of its gradient."""

    @staticmethod
    def forward(_context, x):
        return x.clone()

    @staticmethod
    def backward(_context, gradient):
        gradient = Reduced.apply(gradient)
        reduced = gradient.detach().clone()
        dist.all_reduce(reduced)
        return gradient


class Reduces(nn.Linear):
    def forward(self, x):
        return super().forward(Reduced.apply(x)) ** 3


@gloo_and_fake(2)
def test_double_backward_has_owners_of_its_forward(comm_mode):
    model = nn.Sequential(*(Reduces(WIDTH, WIDTH) for _ in range(2)))
    x = torch.ones(2, WIDTH, requires_grad=True)
    with comm_mode(model):
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert owners(comm_mode) == [("backward", "1"), ("backward", "0")]
        gradient.square().sum().backward()
    # Backward of the first backward, which no module called, then of the forward.
    assert owners(comm_mode)[2:] == [("backward", name) for name in (None, None, "1", "0")]


class Slope(nn.Module):
    def forward(self, x):
        return torch.autograd.grad(Reduced.apply(x).square().sum(), x, create_graph=True)[0]


@gloo_and_fake(2)
def test_backward_in_a_forward_is_its_modules(comm_mode):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Slope())
    with comm_mode(model):
        model(torch.ones(2, WIDTH)).sum().backward()
    assert {owner for _, owner in owners(comm_mode)} == {"1"}
    assert len(comm_mode.events) > 1
