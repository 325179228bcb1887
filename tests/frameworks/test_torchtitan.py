"""torchtitan's models, sharded by its `parallelize` functions."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from derived import fsdp_lines
from frameworks.changes import comm_failure, observed, tree_failure
from oracle import owned_lines, witnessed_twice
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

from pytest_fsdp_comm.errors import RecordingError

pytest.importorskip("torchtitan.protocols.train_spec", reason="needs torchtitan 0.2 and triton")

from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.experiments.simple_fsdp import llama3 as simple_llama3
from torchtitan.models import llama3, llama4
from torchtitan.models.moe import kernels
from torchtitan.models.moe import utils as moe_utils

pytestmark = [
    pytest.mark.distributed(world_size=4),
    # torch warns about calls that torchtitan makes.
    pytest.mark.filterwarnings("ignore:DTensor random operators", "ignore:FSDP2-wrapped module"),
]

WIDTH, HIDDEN, VOCABULARY, LAYERS = 64, 256, 128, 2
BATCH, LENGTH = 2, 16
EXPERTS = 8
MICRO_BATCHES = 4
FLOAT, LONG = 4, 8

EMBEDDING = VOCABULARY * WIDTH * FLOAT
NORM = WIDTH * FLOAT
FEED_FORWARD = 3 * WIDTH * HIDDEN * FLOAT
MATRICES = 4 * WIDTH * WIDTH * FLOAT + FEED_FORWARD
ROUTER = EXPERTS * WIDTH * FLOAT
ACTIVATION = BATCH * LENGTH * WIDTH * FLOAT
# Norms and matrices of two layers, the last norm, the embedding and the output.
PARAMETERS = LAYERS * (2 + 7) + 3


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    """Replace the device and two routing kernels that torchtitan has only for GPUs."""
    histogram = torch.histc
    monkeypatch.setattr(parallel_dims, "device_type", "cpu")
    monkeypatch.setattr(
        torch, "histc", lambda indices, **bins: histogram(indices.float(), **bins).long()
    )
    on_cpu = partial(kernels.generate_permute_indices, use_cpu=True)
    monkeypatch.setattr(moe_utils, "generate_permute_indices", on_cpu)


def configured(models, configure=lambda _: None, **sizes):
    """Return configuration, specification and model arguments of a smaller debug model."""
    config = JobConfig()
    config.training.seq_len = LENGTH
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "none"
    # Without it, the sizes of the all-to-all depend on random weights.
    config.debug.moe_force_load_balance = True
    configure(config)
    spec = models.get_train_spec()
    sizes = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": 4, "vocab_size": VOCABULARY} | sizes
    args = replace(spec.model_args["debugmodel"], **sizes)
    args.update_from_config(config)
    return config, spec, args


def dims_of(**degrees):
    all_degrees = {
        **dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep", "etp"), 1),
        "dp_shard": -1,
        "world_size": 4,
    }
    return ParallelDims(**all_degrees | degrees)


def initialized(model):
    """Initialize the weights, and make FSDP use a reduction that gloo has."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # torchtitan sets a divide factor, so torch would use PREMUL_SUM, which gloo lacks.
            module.set_force_sum_reduction_for_comms(enable=True)
    return model


def parallelized(models, *, configure=lambda _: None, **degrees):
    """Build a model as torchtitan's trainer does."""
    config, spec, args = configured(models, configure)
    with torch.device("meta"):
        model = spec.model_cls(args)
    return initialized(spec.parallelize_fn(model, dims_of(**degrees), config))


def train_step(model, *, is_tensor_parallel=False, has_expert_groups=False):
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    with loss_parallel() if is_tensor_parallel else torch.enable_grad():
        logits = model(tokens)
        cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    clip_grad_norm_(model.parameters(), 1.0, ep_enabled=has_expert_groups)


def tensor_parallel_lines():
    """Return lines of sequence parallelism; backward turns gathers into scatters, and back."""
    pairs = [("tok_embeddings", "reduce_scatter", "all_gather")]
    pairs += [("output", "all_gather", "reduce_scatter")]
    norms = ["norm+output"]
    for layer in range(LAYERS):
        for block, last in (("attention", "wo"), ("feed_forward", "w2")):
            pairs += [(f"layers.{layer}.{block}", "all_gather", "reduce_scatter")]
            pairs += [(f"layers.{layer}.{block}.{last}", "reduce_scatter", "all_gather")]
            norms += [f"layers.{layer}"]
    return [
        *(f"forward {owner} {kind}[tp] {ACTIVATION}" for owner, kind, _ in pairs),
        *(f"backward {owner} {kind}[tp] {ACTIVATION}" for owner, _, kind in pairs),
        *(f"backward {owner} all_reduce[tp] {NORM}" for owner in norms),
        # The loss over a sharded vocabulary reduces maximum, sum and target logit per token.
        *[f"outside - all_reduce[tp] {BATCH * LENGTH * FLOAT}"] * 3,
    ]


def units_of(*, tensor_parallel=1):
    return {
        "tok_embeddings": EMBEDDING // tensor_parallel,
        "layers.0": MATRICES // tensor_parallel + 2 * NORM,
        "layers.1": MATRICES // tensor_parallel + 2 * NORM,
        "norm+output": EMBEDDING // tensor_parallel + NORM,
    }


def clipping(axis, parameters=PARAMETERS):
    """Return the all-reduce of the norms, one number per parameter."""
    return [f"optimizer - all_reduce[{axis}] {parameters * FLOAT}"]


def unit_names(tree):
    return {tree.unit_name(index) for index in range(len(tree.units))}


def test_llama3_fsdp(comm_mode, fsdp_tree):
    model = parallelized(llama3)
    witnessed_twice(comm_mode, model, lambda: train_step(model))
    assert owned_lines(comm_mode) == sorted(
        fsdp_lines(units_of(), axis="fsdp", kept="norm+output") + clipping("fsdp")
    )
    tree = fsdp_tree(model)
    assert unit_names(tree) == {"", *units_of()}
    assert not tree.findings


def test_llama3_hsdp(comm_mode, fsdp_tree):
    model = parallelized(llama3, dp_replicate=2)
    witnessed_twice(comm_mode, model, lambda: train_step(model))
    expected = fsdp_lines(
        units_of(), axis="fsdp", kept="norm+output", replicate=("dp_replicate", 2)
    ) + clipping("fsdp")
    assert owned_lines(comm_mode) == sorted(expected)
    assert {(axis.name, axis.size) for axis in fsdp_tree(model).mesh_axes} == {
        ("dp_replicate", 2),
        ("fsdp", 2),
    }


def test_llama3_fsdp_with_tp(comm_mode, fsdp_tree):
    model = parallelized(llama3, tp=2)
    witnessed_twice(comm_mode, model, lambda: train_step(model, is_tensor_parallel=True))
    expected = (
        fsdp_lines(units_of(tensor_parallel=2), axis="fsdp", kept="norm+output")
        + tensor_parallel_lines()
    )
    assert owned_lines(comm_mode) == sorted(expected + clipping("fsdp") + clipping("tp"))
    assert unit_names(fsdp_tree(model)) == {"", *units_of()}


@pytest.mark.parametrize("ep", [2, 4])
def test_llama4_experts_use_two_axes(comm_mode, fsdp_tree, ep):
    """Expert parameters are gathered over `efsdp`; tokens are sent over `ep`."""
    model = parallelized(llama4, ep=ep)
    witnessed_twice(comm_mode, model, lambda: train_step(model, has_expert_groups=True))
    units = units_of()
    units["layers.1"] += ROUTER
    expected = fsdp_lines(units, axis="fsdp", kept="norm+output")
    experts = {"layers.1.moe.experts": EXPERTS * FEED_FORWARD // ep}
    if ep == 2:
        expected += fsdp_lines(experts, axis="efsdp", kept="norm+output")
    # torch has one group of all ranks, so with ep=4 both axes have the same name.
    axis = "ep" if ep == 2 else "fsdp"
    expected += [
        f"forward layers.1.moe.experts all_to_all[{axis}] {EXPERTS * LONG}",
        *[f"forward layers.1.moe.experts all_to_all[{axis}] {ACTIVATION}"] * 2,
        *[f"backward layers.1.moe.experts all_to_all[{axis}] {ACTIVATION}"] * 2,
    ]
    # Expert gradients are clipped over both axes at once; the router adds a parameter.
    expected += clipping("fsdp", 3) + clipping("fsdp", PARAMETERS + 1)
    assert owned_lines(comm_mode) == sorted(expected)
    assert unit_names(fsdp_tree(model)) == {"", *units, *experts}
    if ep == 4:
        with pytest.raises(RecordingError, match="fsdp"):
            comm_mode.counts("all_to_all", axis="ep")


@pytest.mark.parametrize("etp", [1, 2])
def test_llama4_with_tensor_parallel_experts_owns_all(comm_mode, etp):
    model = parallelized(llama4, tp=2, ep=2, etp=etp)
    step = partial(train_step, model, is_tensor_parallel=True, has_expert_groups=True)
    witnessed_twice(comm_mode, model, step)
    unowned = {(event.phase.value, event.kind) for event in comm_mode.events if event.owner is None}
    assert unowned == {("optimizer", "all_reduce"), ("outside", "all_reduce")}
    # With tensor-parallel experts, each token goes to both ranks of a pair instead of one.
    tokens = ACTIVATION * etp // 2
    assert comm_mode.counts("all_to_all", axis="ep") == 5
    assert comm_mode.nbytes("all_to_all", axis="ep") == 4 * tokens + EXPERTS * LONG
    assert comm_mode.nbytes("all_to_all") == comm_mode.nbytes(
        "all_to_all", owner="layers.1.moe.experts"
    )
    of_experts = {event.axis for event in comm_mode.events if event.owner == "layers.1.moe.experts"}
    assert of_experts == ({"efsdp", "ep"} if etp == 1 else {"ep", "etp"})


# Pipelines, with four layers in two stages.


class Pipeline:
    """The stages of this rank, built as by torchtitan's trainer, and a step of 4 micro-batches."""

    def __init__(self, schedule):
        def configure(config):
            config.training.local_batch_size = MICRO_BATCHES
            config.parallelism.pipeline_parallel_degree = 2
            config.parallelism.pipeline_parallel_schedule = schedule

        config, spec, args = configured(llama3, configure, n_layers=4)
        with torch.device("meta"):
            model = spec.model_cls(args)
        dims = dims_of(pp=2)
        self.schedule, self.parts, self.is_first, self.is_last = spec.pipelining_fn(
            *(model, dims, config, torch.device("cpu"), args),
            *(spec.parallelize_fn, cross_entropy_loss),
        )
        for part in self.parts:
            initialized(part)
        self.pp = dims.get_mesh("pp")

    def step(self):
        tokens = torch.arange(MICRO_BATCHES * LENGTH).view(MICRO_BATCHES, LENGTH)
        inputs = [tokens] if self.is_first else []
        target = {"target": tokens, "losses": []} if self.is_last else {}
        self.schedule.step(*inputs, **target, return_outputs=False)
        parameters = [parameter for part in self.parts for parameter in part.parameters()]
        clip_grad_norm_(parameters, 1.0, pp_mesh=self.pp)


@pytest.mark.parametrize(
    ("schedule", "phase", "layers", "hops"),
    [
        # Each stage gathers once; its parameters stay gathered for all micro-batches.
        ("1F1B", "forward", ((0, 1), (2, 3)), 1),
        # The schedule gathers ahead; four stages have three hops.
        ("Interleaved1F1B", "outside", ((0, 3), (1, 2)), 3),
    ],
)
def test_pipelines_gather_once_per_step(comm_mode, schedule, phase, layers, hops):
    pipeline = Pipeline(schedule)
    witnessed_twice(comm_mode, pipeline.parts, pipeline.step, warm_up=1)
    rank = pipeline.pp.get_local_rank()
    units = {f"layers.{number}": MATRICES + 2 * NORM for number in layers[rank]}
    units |= {"norm+output": EMBEDDING + NORM} if rank else {"tok_embeddings": EMBEDDING}
    activation = LENGTH * WIDTH * FLOAT
    # The norm over all stages sums one number per stage.
    expected = [*clipping("fsdp", 2 * 9 + 1 + rank), f"outside - all_reduce[pp] {FLOAT}"]
    for unit, nbytes in units.items():
        expected += [f"{phase} {unit} all_gather[fsdp] {nbytes}"]
        expected += [f"backward {unit} reduce_scatter[fsdp] {nbytes}"]
    for kind in ("send", "recv"):
        expected += [f"outside - {kind}[pp] {activation}"] * (hops * MICRO_BATCHES)
    assert owned_lines(comm_mode) == sorted(expected)


# SimpleFSDP gathers each parameter when forward reads it, without units.


def matrices_of(*, tensor_parallel=1):
    """Return the bytes of each module that reads a parameter, in the order of forward."""
    owners = {"tok_embeddings": EMBEDDING // tensor_parallel}
    for layer in range(LAYERS):
        owners[f"layers.{layer}.attention_norm"] = NORM
        for name in ("wq", "wk", "wv", "wo"):
            owners[f"layers.{layer}.attention.{name}"] = WIDTH * WIDTH * FLOAT // tensor_parallel
        owners[f"layers.{layer}.ffn_norm"] = NORM
        for name in ("w1", "w3", "w2"):
            nbytes = WIDTH * HIDDEN * FLOAT // tensor_parallel
            owners[f"layers.{layer}.feed_forward.{name}"] = nbytes
    return owners | {"norm": NORM, "output": EMBEDDING // tensor_parallel}


def simple_lines(owners):
    return [
        line
        for owner, nbytes in owners.items()
        for line in (
            f"forward {owner} all_gather[fsdp] {nbytes}",
            f"backward {owner} reduce_scatter[fsdp] {nbytes}",
        )
    ]


ROLES = {"all_gather": "parameters", "reduce_scatter": "gradients", "all_reduce": "gradients"}


def assert_roles(comm_mode, axes):
    """Check that data axes carry only parameters and their gradients."""
    sent = [e for e in comm_mode.events if e.axis in axes and e.phase != "optimizer"]
    assert {e.kind for e in sent} <= ROLES.keys()
    assert all(e.role == ROLES[e.kind] for e in sent)


def test_simple_fsdp(comm_mode, fsdp_tree):
    model = parallelized(simple_llama3)
    witnessed_twice(comm_mode, model, lambda: train_step(model))
    assert owned_lines(comm_mode) == sorted(simple_lines(matrices_of()) + clipping("fsdp"))
    assert_roles(comm_mode, {"fsdp"})
    tree = fsdp_tree(model)
    assert tree.is_sharded
    assert not tree.units


# float8 through torchao.


def in_float8(config):
    config.training.mixed_precision_param = "bfloat16"
    config.model.converters = ["quantize.linear.float8"]
    float8 = config.quantize.linear.float8
    float8.enable_fsdp_float8_all_gather = True
    float8.precompute_float8_dynamic_scale_for_fsdp = True
    float8.emulate = True
    float8.filter_fqns = ["output"]


def float8_training():
    """Convert a model's layers as torchtitan's trainer does; return it and its step."""
    converters = pytest.importorskip("torchtitan.components.quantization.float8")
    pytest.importorskip("torchao.float8", reason="needs torchao")
    config, spec, args = configured(llama3, in_float8)
    dims = dims_of()
    with torch.device("meta"):
        model = spec.model_cls(args)
    converter = converters.Float8LinearConverter(config, dims)
    converter.convert(model)
    model = initialized(spec.parallelize_fn(model, dims, config))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        train_step(model)
        optimizer.step()
        optimizer.zero_grad()
        converter.post_optimizer_hook(model)

    return model, step


def test_float8_weights_are_gathered_in_8_bits(comm_mode):
    model, step = float8_training()
    witnessed_twice(comm_mode, model, step, warm_up=1)
    half, eighth = 2, 4  # divisors of the size in 32 bits
    gathered = {unit: nbytes // half for unit, nbytes in units_of().items()}
    for layer in ("layers.0", "layers.1"):
        gathered[layer] = MATRICES // eighth + 2 * NORM // half
    expected = [
        line
        for line in fsdp_lines(gathered, axis="fsdp", kept="norm+output")
        if "reduce_scatter" not in line
    ]
    expected += [f"backward {unit} reduce_scatter[fsdp] {n}" for unit, n in units_of().items()]
    # One all-reduce computes the largest value of each of a layer's seven matrices.
    expected += [*clipping("fsdp"), f"outside - all_reduce[fsdp] {LAYERS * 7 * FLOAT}"]
    assert owned_lines(comm_mode) == sorted(expected)


# Changes that a team makes in its configuration.


def other_seed_and_rate(config):
    config.debug.seed = 7
    config.optimizer.lr = 0.1
    config.metrics.log_freq = 1


def recomputed(config):
    config.activation_checkpoint.mode = "full"


def of(comm_mode, models, *, configure=lambda _: None, **degrees):
    model = parallelized(models, configure=configure, **degrees)
    step = partial(train_step, model, has_expert_groups=degrees.get("ep", 1) > 1)
    return observed(comm_mode, model, step)


def test_change_of_experts_is_reported(comm_mode):
    reviewed = of(comm_mode, llama4, ep=2)
    assert not comm_failure(reviewed, of(comm_mode, llama4, configure=other_seed_and_rate, ep=2))
    again = of(comm_mode, llama4, configure=recomputed, ep=2)
    # The token counts, and the tokens there and back. The gather is one for one in another phase.
    assert (EXPERTS * LONG + 2 * ACTIVATION) / 1024 == 16.0625
    assert comm_failure(reviewed, again)[0] == (
        "recomputation now repeats the forward collectives of layers.1.moe.experts: "
        "3 calls, 16.1 KiB in total"
    )
    lost = of(comm_mode, llama4, ep=1)
    assert any(
        line.endswith("no more collectives over ep") for line in comm_failure(reviewed, lost)
    )
    assert "layers.1.moe.experts: is no longer a unit (fsdp2)" in tree_failure(reviewed, lost)
