"""DeepSpeed's ZeRO, stages 1 to 3, on the CPU accelerator and gloo."""

import pytest
import torch
from frameworks.changes import observed, told_of
from models import LINEAR_NBYTES, WIDTH, Model

pytest.importorskip("deepspeed")

import deepspeed

pytestmark = [
    pytest.mark.distributed(world_size=4),
    # Of torch, about what DeepSpeed calls.
    pytest.mark.filterwarnings("ignore"),
]

LINEARS = 6
WEIGHTS = LINEARS * LINEAR_NBYTES
FLOAT, DOUBLE = 4, 8
# What keeps small parameters whole, fetches ahead and reduces late is off.
EACH = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "reduce_bucket_size": WIDTH * WIDTH,
}


@pytest.fixture(autouse=True)
def _without_its_extension(monkeypatch):
    """DeepSpeed compiles one for communication within a machine, in each rank at once."""
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", None)


def build(stage, *, batches=1, lr=0.1, dtype=None, **settings):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": batches,
        "zero_optimization": {"stage": stage, **settings},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
    }
    if dtype:
        config[dtype] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=Model(), config=config)

    def step():
        for _ in range(batches):
            given = torch.randn(2, WIDTH, dtype=next(engine.parameters()).dtype)
            engine.backward(engine(given).float().square().mean())
            engine.step()

    return engine, step


def trained(comm_mode, stage, **options):
    engine, step = build(stage, **options)
    return observed(comm_mode, engine, step, warm_up=3)


def sent(comm_mode):
    """Phase, kind, bytes and role of each collective, none of which serves one module."""
    assert {event.owner for event in comm_mode.events} == {None}
    return [
        f"{event.phase.value} {event.kind} {event.nbytes} {event.role and event.role.value}"
        for event in comm_mode.events
    ]


NORM = f"outside all_reduce {FLOAT} None"
NORM_3 = f"outside all_reduce {DOUBLE} None"
UPDATE = f"outside all_gather {WEIGHTS} parameters"


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_reduce_after_backward_and_gather_what_was_updated(
    comm_mode, fsdp_tree, stage
):
    engine, step = build(stage)
    observed(comm_mode, engine, step, warm_up=3)
    assert sent(comm_mode) == [f"outside all_reduce {WEIGHTS} None", NORM, UPDATE]
    assert not fsdp_tree(engine).is_sharded


def test_small_buckets_of_stage_2_are_reduced_in_backward(comm_mode):
    trained(comm_mode, 2, **EACH)
    reduced = f"all_reduce {LINEAR_NBYTES} None"
    in_backward = [f"backward {reduced}"] * (LINEARS - 1)
    assert sent(comm_mode) == [*in_backward, f"outside {reduced}", NORM, UPDATE]


def test_stage_3_gathers_each_parameter_twice_and_reduces_it_once(comm_mode, fsdp_tree):
    engine, step = build(3, **EACH)
    observed(comm_mode, engine, step, warm_up=3)
    gathered = f"all_gather {LINEAR_NBYTES} parameters"
    reduced = f"reduce_scatter {LINEAR_NBYTES} gradients"
    assert sorted(sent(comm_mode)) == sorted(
        [f"forward {gathered}", f"backward {gathered}"] * LINEARS
        + [f"backward {reduced}"] * (LINEARS - 1)
        + [f"outside {reduced}", NORM_3]
    )
    # As between steps, when the parameters themselves are empty.
    assert all(parameter.numel() == 0 for parameter in engine.parameters())
    tree = fsdp_tree(engine)
    assert tree.is_sharded
    assert not tree.findings
    assert {(one.shape, one.local_numels) for one in tree.parameters} == {
        ((WIDTH, WIDTH), (WIDTH * WIDTH // 4,) * 4)
    }
    assert {axis.text for one in tree.parameters for axis in one.placements} == {"FlatShard()"}


def test_stage_3_fetches_ahead_in_one_gather_and_keeps_small_parameters(comm_mode, fsdp_tree):
    trained(comm_mode, 3, stage3_param_persistence_threshold=0)
    reduced = f"outside reduce_scatter {WEIGHTS} gradients"
    assert sent(comm_mode) == [f"forward all_gather {WEIGHTS} parameters", reduced, NORM_3]
    engine, step = build(3)
    observed(comm_mode, engine, step, warm_up=3)
    updates = [f"outside all_gather {LINEAR_NBYTES} parameters"] * LINEARS
    assert sent(comm_mode) == [reduced, NORM_3, *updates]
    tree = fsdp_tree(engine)
    assert not tree.is_sharded


def test_the_tree_of_parts_that_ranks_cannot_share_evenly(fsdp_tree):
    model = torch.nn.Linear(3, 2, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        },
    )
    tree = fsdp_tree(engine)
    (parameter,) = tree.parameters
    assert parameter.local_numels == (2, 2, 2, 0)
    assert parameter.local_numel == parameter.local_numels[torch.distributed.get_rank()]
    with deepspeed.zero.GatheredParameters([model.weight]):
        assert model.weight.numel() == 6
        assert fsdp_tree(engine) == tree


@pytest.mark.parametrize("stage", [1, 3])
def test_innocent_changes_are_not_told(comm_mode, stage):
    reviewed = trained(comm_mode, stage, **EACH)
    torch.manual_seed(1)
    assert not told_of(reviewed, trained(comm_mode, stage, lr=0.5, **EACH))


CHANGES = {
    "stage 2 reduces each of two batches": (
        {"stage": 1, "batches": 2},
        {"stage": 2, "batches": 2},
        "(no-module) outside: all_reduce[size4.stride1] 2 -> 3 (+1), 1.5 -> 3.0 KiB in all per "
        "rank",
    ),
    "small parameters stay whole": (
        {"stage": 3, **EACH},
        {"stage": 3, **EACH, "stage3_param_persistence_threshold": WIDTH * WIDTH + 1},
        "(no-module) outside: all_gather[world] 0 -> 6 (+6), 0 -> 1.5 KiB in all per rank",
    ),
    "single precision": (
        {"stage": 1, "dtype": "bf16"},
        {"stage": 1},
        "parameters[size4.stride1] bfloat16 -> float32, x2 bytes",
    ),
    "stage 2 instead of 3": (
        {"stage": 3, **EACH},
        {"stage": 2, **EACH},
        "nothing is sent over world any more",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told_in_a_true_first_line(comm_mode, change):
    reviewed, changed, first = CHANGES[change]
    old, new = trained(comm_mode, **reviewed), trained(comm_mode, **changed)
    assert told_of(old, new)[0] == first
