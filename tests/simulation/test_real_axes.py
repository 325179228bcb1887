"""Axes with a process for each coordinate: what ranks tell each other along them is true."""

import pytest
import torch
import torch.distributed as dist
from models import ACTIVATION_NBYTES
from real_axes import MICRO_BATCHES, pipeline
from torch.distributed import _functional_collectives as functional
from torch_facts import needs_pipelines_on_gloo

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.simulation import groups
from pytest_fsdp_comm.simulation.values import SimulationError

# torch tells which of its own functions the stages call.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@needs_pipelines_on_gloo
@pytest.mark.distributed(world_size=4096, simulate=True, real={"pp": 4})
@pytest.mark.parametrize(
    ("schedule", "sends_of_ranks"),
    [
        # An activation to the next stage and a gradient to the one before, unless a stage has none
        # or it is this rank's own: of a V the last two stages that follow each other are.
        ("ScheduleGPipe", [1, 2, 2, 1]),
        pytest.param("Schedule1F1B", [1, 2, 2, 1], marks=pytest.mark.release),
        pytest.param("ScheduleInterleaved1F1B", [3, 4, 4, 3], marks=pytest.mark.release),
        pytest.param("ScheduleLoopedBFS", [3, 4, 4, 3], marks=pytest.mark.release),
        ("ScheduleInterleavedZeroBubble", [3, 4, 4, 3]),
        pytest.param("ScheduleZBVZeroBubble", [2, 4, 4, 2], marks=pytest.mark.release),
        ("ScheduleDualPipeV", [2, 4, 4, 2]),
    ],
)
def test_stages_tell_each_other_their_shapes(
    comm_mode, device_mesh, dist_info, schedule, sends_of_ranks
):
    mesh = device_mesh(pp=4, dp=-1)
    parts, step = pipeline(schedule, mesh)
    step()
    with comm_mode(parts):
        step()
    rank = mesh["pp"].get_local_rank()
    assert dist_info.rank == rank * 1024
    sizes = [event.nbytes for event in comm_mode.events if event.kind == "send"]
    assert sizes == [ACTIVATION_NBYTES] * (sends_of_ranks[rank] * MICRO_BATCHES)
    assert comm_mode.counts("reduce_scatter", axis="dp") > 0


@needs_pipelines_on_gloo
@pytest.mark.distributed(world_size=4096, simulate=True)
def test_pipeline_without_real_stages_has_a_remedy(device_mesh):
    _, step = pipeline("Schedule1F1B", device_mesh(pp=4, dp=-1))
    if torch.__version__ >= (2, 15):  # torch refuses it before, with a cure of its own
        with pytest.raises(RuntimeError, match="Provide complete static metadata"):
            step()
        return
    with pytest.raises(SimulationError, match=r"real=\{'pp': 4\}"):
        step()


@pytest.mark.distributed(world_size=16, simulate=True, real={"pp": 2, "ep": (2, 1)})
def test_objects_and_whole_numbers_arrive(device_mesh, dist_info):
    mesh = device_mesh(pp=2, dp=4, ep=2)
    assert mesh["dp"].get_local_rank() == 0
    rank, group = mesh["ep"].get_local_rank(), mesh["ep"].get_group()
    first = dist_info.rank - rank
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": dist_info.rank}, group=group)
    assert objects == [{"rank": first}, {"rank": first + 1}]
    objects = [dist_info.rank]
    dist.broadcast_object_list(objects, src=first + 1, group=group)
    assert objects == [first + 1]
    objects = [None, None] if rank == 0 else None
    dist.gather_object(rank, objects, dst=first, group=group)
    assert objects == ([0, 1] if rank == 0 else None)
    objects = [None]
    dist.scatter_object_list(objects, ["a", "b"] if rank == 0 else None, src=first, group=group)
    assert objects == ["ab"[rank]]

    own = torch.arange(4) + 10 * rank
    received = torch.empty_like(own)
    dist.all_to_all_single(received, own, group=group)
    assert received.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][rank]
    columns = torch.ops._dtensor.shard_dim_alltoall(own[None], 0, 1, group.group_name)
    assert columns.tolist() == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]][rank]
    base = torch.zeros(8, dtype=torch.int64)
    dist.all_gather([base[:4], base[4:]], own, group=group)
    assert base.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    dist.all_reduce(own, group=group)
    assert own.tolist() == [10, 12, 14, 16]
    reduced = {"min": 4, "max": 5, "product": 20, "band": 4, "bor": 5, "bxor": 1}
    for how, expected in reduced.items():
        assert functional.all_reduce(torch.tensor(5 - rank), how, group).item() == expected
    # What nobody knows stays unknown, on both ends, and what follows it is told apart.
    chosen = torch.zeros(1, dtype=torch.int64)
    dist.all_gather([chosen, chosen.clone()], torch.rand(1).long(), group=group)
    with pytest.raises(SimulationError):
        chosen.item()
    # Ahead of their use, in the order in which they were sent.
    waits = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    works = [dist.irecv(wait, first + 1 - rank, group) for wait in waits]
    works += [dist.isend(torch.tensor([rank, n]), first + 1 - rank, group) for n in range(2)]
    for work in works:
        work.wait()
    assert [wait.tolist() for wait in reversed(waits)] == [[1 - rank, 1], [1 - rank, 0]]


@pytest.mark.distributed(world_size=16, simulate=True, real={"pp": 2})
def test_what_does_not_run_sends_nothing(device_mesh, dist_info):
    mesh = device_mesh(pp=2, dp=8)
    kept = torch.zeros(1, dtype=torch.int64)
    dist.recv(kept, dist_info.rank + 1, mesh["dp"].get_group())
    with pytest.raises(SimulationError, match="they come from a rank that does not run"):
        kept.item()
    with pytest.raises(FsdpCommError, match=r"receives from any rank.*: pass the source rank"):
        dist.recv(kept, None, mesh["pp"].get_group())


@pytest.mark.distributed(world_size=16, simulate=True, real={"pp": 4})
def test_a_mesh_that_has_the_axis_elsewhere_is_refused(device_mesh):
    device_mesh(pp=4, dp=4)
    with pytest.raises(FsdpCommError) as refused:
        device_mesh(dp=4, pp=4)
    assert str(refused.value) == (
        "expected axis 'pp' of a mesh to have size 4 and stride 4, as in real=, got size 4 and "
        "stride 1: write real={'pp': (4, 1)}, or change the mesh"
    )
    with pytest.raises(FsdpCommError, match=r"got size 2 .* real=\{'pp': \(2, 8\)\}"):
        device_mesh(pp=2, dp=8)


@pytest.mark.distributed(world_size=16, simulate=True, real={"ep": (2, 1)}, ranks=[0, 15])
def test_other_axes_have_the_ranks_that_are_chosen(dist_info):
    assert dist_info.rank in {0, 1, 14, 15}


def test_an_axis_that_no_mesh_has_is_reported(pytester):
    pytester.makepyfile(
        test_it="""
        import pytest
        import torch

        @pytest.mark.distributed(world_size=16, simulate=True, real={"pipeline": 4})
        def test_wrong(device_mesh):
            device_mesh(pp=4, dp=4)

        @pytest.mark.distributed(world_size=16, simulate=True, real={"pp": 4})
        def test_right(device_mesh):
            device_mesh(pp=4, dp=4)
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*real= contains pipeline, but the only mesh axes are dp, pp: rename or remove unknown "
            "axes in real="
        ]
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # Into one tensor for each that is sent, which has it of all ranks.
        ({"inputs": None}, [0, 2, 1, 3]),
        # A list of the tensors of each rank.
        ({"input_list": None}, [0, 1, 2, 3]),
    ],
)
def test_several_gathered_at_once_arrive_in_order(names, expected):
    parts = [[torch.tensor([0]), torch.tensor([1])], [torch.tensor([2]), torch.tensor([3])]]
    received = groups._compute_received("all_gather", names, 0, parts)
    assert [int(each) for each in received] == expected
