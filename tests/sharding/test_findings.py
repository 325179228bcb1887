"""Each wrapping mistake is found on a model that makes it, and only there."""

import functools
import warnings

import pytest
import torch
from models import Block, TokenModel
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.fsdp_tree import TreeFactory
from pytest_fsdp_comm.recording.owners.fsdp import groups_of_state
from pytest_fsdp_comm.tree.finding import FindingSettings
from pytest_fsdp_comm.tree.findings.rules import RULES

fsdp1 = functools.partial(Fsdp1, device_id=torch.device("cpu"), use_orig_params=True)


pytestmark = pytest.mark.usefixtures("four_ranks")


def make(width=8):
    return TokenModel(3, width, norm=True)


def shard_blocks(model, *, left_out=None, **policy):
    for index, layer in enumerate(model.layers):
        if index != left_out:
            fully_shard(layer, **policy)
    return model


def healthy():
    return fully_shard(shard_blocks(make()))


def no_root():
    return shard_blocks(make().requires_grad_(requires_grad=False))


def fsdp1_in_fsdp2():
    model = make()
    model.layers[1] = fsdp1(model.layers[1])
    with torch.no_grad():
        return fully_shard(shard_blocks(model, left_out=1))


def fsdp1_parent_first():
    model = fsdp1(make())
    inner = model.module
    inner.layers[0] = fsdp1(inner.layers[0])
    return model


def split_tie():
    model = make()
    model.head.weight = model.embed.weight
    fully_shard(model.embed)
    return fully_shard(shard_blocks(model))


def forgotten_head():
    model = make()
    kept = model.head
    del model.head
    fully_shard(shard_blocks(model))
    model.head = kept
    return model


def one_block_forgotten():
    return fully_shard(shard_blocks(make(), left_out=1))


def lora():
    """A frozen and a trainable linear in each block."""
    model = make(width=64)
    for layer in model.layers:
        layer.up.requires_grad_(requires_grad=False)
    return model


def fsdp1_blocks(model):
    for number, layer in enumerate(model.layers):
        model.layers[number] = fsdp1(layer)
    return fsdp1(model)


def norm_on_its_own():
    model = make(width=64)
    fully_shard(model.layers[0].norm)
    return fully_shard(shard_blocks(model))


def odd_sizes():
    model = make(width=5)
    return fully_shard(shard_blocks(model))


def narrow():
    model = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8))
    return fully_shard(model)


def kept_in_full_precision(ignored=(nn.LayerNorm,), norm=nn.LayerNorm):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.norm = norm(8)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says the same in its own words
        return fsdp1(
            Normed(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            mixed_precision=MixedPrecision(
                param_dtype=torch.bfloat16, _module_classes_to_ignore=ignored
            ),
        )


def replicated_beside_tensor_parallel():
    model = make()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, {"head": ColwiseParallel()})


def shard_rows(whole, mesh, *, copies):
    """Build a DTensor from the first quarter of a tensor, as a view or as a copy."""
    rows = whole.chunk(4)[0]
    return DTensor.from_local(rows.clone() if copies else rows, mesh, [Shard(0)])


def loaded(*, copies):
    """A sharded model that adopts the tensors of a state dict."""
    model = fully_shard(nn.Linear(64, 64, bias=False))
    mesh = model.weight.device_mesh
    state = {
        name: shard_rows(torch.zeros(tensor.shape), mesh, copies=copies)
        for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    return model


def empty_then_filled():
    with torch.device("meta"):
        model = make(width=5)
    return fully_shard(shard_blocks(model)).to_empty(device="cpu")


def views_of_one_flat_buffer():
    """The two shards fill the buffer together."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for layer, rows in zip(model, torch.zeros(32, 64).split(16), strict=True):
        layer.weight = nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)]))
    return model


def tied_as_a_view():
    """A plain parameter uses the rest of the storage."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    shard = shard_rows(model[0].weight.detach(), mesh, copies=False)
    model[1].weight = nn.Parameter(shard)
    return model


LEVELS = {rule.code: rule.level for rule in RULES}
TINY = FindingSettings(small_nbytes=10_000, replicated_nbytes=512, padding_nbytes=1)
BLOCKS = ("layers.0", "layers.1", "layers.2")
WHOLE = (
    "embed.weight",
    *(f"{block}.{name}.weight" for block in BLOCKS for name in ("down", "up")),
)
CASES = {
    "healthy": (healthy, {}),
    "no-root-unit": (
        no_root,
        {
            "no-root-unit": (BLOCKS, 3 * 4 * (16 + 144 + 136)),
            "large-replicated": (("embed.weight", "head.weight"), 2 * 512),
        },
    ),
    "nested-kinds": (
        fsdp1_in_fsdp2,
        {"nested-kinds": (("layers.1",), None)},
    ),
    "wrapped-after-parent": (
        fsdp1_parent_first,
        {
            "wrapped-after-parent": (("layers.0",), 4 * (256 + 3 * 296)),
            "partly-wrapped": (("layers.1", "layers.2"), 2 * 4 * 296),
        },
    ),
    "split-tie": (split_tie, {"split-tie": (("embed.weight", "head.weight"), 4 * 128)}),
    "unmanaged-parameter": (forgotten_head, {"unmanaged-parameter": (("head.weight",), 512)}),
    "partly-wrapped": (one_block_forgotten, {"partly-wrapped": (("layers.1",), 4 * 296)}),
    "mixed-frozen": (
        lambda: fsdp1_blocks(lora()),
        {"mixed-frozen": (BLOCKS, 3 * 4 * (64 * 128 + 128))},
    ),
    "unit-too-small": (norm_on_its_own, {"unit-too-small": (("layers.0.norm",), 4 * 128)}),
    "padding": (odd_sizes, {"padding": (BLOCKS, None)}),
    "padding of few rows": (narrow, {"padding": (("",), 4 * (2 * 8 + 2))}),
    "oversized-storage": (
        lambda: loaded(copies=False),
        {"oversized-storage": (("weight",), 3 * 4 * 16 * 64)},
    ),
    "precision-override": (kept_in_full_precision, {"precision-override": (("norm",), 4 * 16)}),
    "large-replicated": (
        replicated_beside_tensor_parallel,
        {"large-replicated": (WHOLE, 7 * 512)},
    ),
}


@pytest.mark.parametrize(("build", "expected"), CASES.values(), ids=CASES.keys())
def test_each_mistake_has_exactly_its_findings(build, expected):
    model = build()
    tree = TreeFactory(findings=TINY)(model)
    if build is split_tie and not hasattr(
        groups_of_state(model._get_fsdp_state())[0].fsdp_params[0], "_orig_param_uid"
    ):
        pytest.skip("this torch forgets what was tied")
    found = {finding.code: finding for finding in tree.findings}
    assert set(found) == set(expected), str(tree)
    for code, (fqns, nbytes) in expected.items():
        assert found[code].fqns == fqns
        assert found[code].level == LEVELS[code]
        if nbytes is not None:
            assert found[code].nbytes == nbytes
        assert found[code].reason
        assert found[code].cure
        assert f"\n{LEVELS[code]} {code}" in str(tree)


def pair_of_models():
    """Two models in one module, each with a root unit."""
    holder = nn.Module()
    holder.generator, holder.discriminator = healthy(), healthy()
    holder.forward = lambda tokens: holder.discriminator(holder.generator(tokens).argmax(-1))
    return holder


def both_kinds_side_by_side():
    model = nn.Module()
    model.first = fully_shard(make())
    model.second = fsdp1(make())
    return model


def blocks_of_units():
    """Units that have no parameters, since all of their modules are units."""
    model = make()
    for layer in model.layers:
        for module in (layer.norm, layer.up, layer.down):
            fully_shard(module)
    return fully_shard(shard_blocks(model))


def tied_in_one_group():
    model = TokenModel(3, tied=True)
    fully_shard([model.embed, model.head])
    return fully_shard(shard_blocks(model))


def frozen_head_outside():
    model = forgotten_head()
    model.head.requires_grad_(requires_grad=False)
    return model


def small_linear_left():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2, bias=False))
    fully_shard(model[0])
    return fully_shard(model)


def frozen_block_apart():
    model = make()
    model.layers[0].requires_grad_(requires_grad=False)
    model.layers[0] = fsdp1(model.layers[0])
    return fsdp1(model)


def replicated_on_purpose():
    model = shard_blocks(make())
    replicate(model.head)
    return model


def few_frozen():
    model = make()
    for layer in model.layers:
        layer.norm.requires_grad_(requires_grad=False)
    return fsdp1_blocks(model)


def frozen_biases():
    model = make(width=64)
    for layer in model.layers:
        layer.up.weight.requires_grad = layer.down.bias.requires_grad = False
    return fsdp1_blocks(model)


def norms_apart(**policy):
    model = make(width=64)
    for layer in model.layers:
        fully_shard(layer.norm, **policy)
    return fully_shard(shard_blocks(model))


def adapters_in_frozen_fsdp1():
    model = make(width=64).requires_grad_(requires_grad=False)
    for layer in model.layers:
        layer.norm = fsdp1(layer.norm.requires_grad_(requires_grad=True))
    return fsdp1_blocks(model)


INNOCENT = {
    "no-root-unit": (pair_of_models,),
    "nested-kinds": (both_kinds_side_by_side,),
    "wrapped-after-parent": (blocks_of_units,),
    "split-tie": (tied_in_one_group,),
    "unmanaged-parameter": (frozen_head_outside,),
    "partly-wrapped": (small_linear_left, frozen_block_apart),
    "large-replicated": (replicated_on_purpose, forgotten_head),
    "mixed-frozen": (lambda: fully_shard(shard_blocks(lora())), few_frozen, frozen_biases),
    "unit-too-small": (
        lambda: norms_apart(mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32)),
        lambda: norms_apart(reshard_after_forward=False),
        adapters_in_frozen_fsdp1,
        healthy,
    ),
    "unit-too-large": (lambda: fully_shard(nn.Embedding(256, 64)),),
    "padding": (lambda: fsdp1_blocks(make(width=5)),),
    "oversized-storage": (
        healthy,
        lambda: loaded(copies=True),
        lambda: fully_shard(nn.Linear(64, 2)),  # two rows on four ranks
        empty_then_filled,
        views_of_one_flat_buffer,
        tied_as_a_view,
        lambda: fsdp1_blocks(make(width=5)),
        replicated_beside_tensor_parallel,
    ),
    "precision-override": (lambda: kept_in_full_precision((nn.BatchNorm1d,), nn.BatchNorm1d),),
}


@pytest.mark.parametrize(
    ("code", "build"), [(code, build) for code, builds in INNOCENT.items() for build in builds]
)
def test_what_is_next_to_a_mistake_is_none(code, build):
    findings = FindingSettings(
        small_nbytes=10_000,
        replicated_nbytes=512,
        large_nbytes=1000 if code == "unit-too-large" else 1 << 30,
        padding_nbytes=1,
    )
    tree = TreeFactory(findings=findings)(build())
    assert code not in [finding.code for finding in tree.findings], str(tree)


def test_blocks_of_fsdp1_need_a_root_too():
    model = make()
    with_root = fsdp1_blocks(model)
    finding = TreeFactory()(model).findings[0]
    assert (finding.code, finding.fqns) == ("no-root-unit", BLOCKS)
    assert finding.cure == "wrap the model itself in FullyShardedDataParallel too"
    assert not TreeFactory()(with_root).findings


def test_a_unit_above_the_threshold_is_too_large():
    settings = FindingSettings(large_nbytes=1000)
    tree = TreeFactory(findings=settings)(fully_shard(make()))
    (finding,) = tree.findings
    assert (finding.code, finding.fqns) == ("unit-too-large", ("",))
    assert finding.nbytes == 4 * (256 + 3 * 296)


def test_every_code_has_a_case_and_a_neighbour():
    assert set(LEVELS) - set(CASES) == {"ranks-differ", "unit-too-large"}
    assert set(LEVELS) - set(INNOCENT) == {"ranks-differ"}


def test_levels_are_the_projects_choice():
    settings = FindingSettings(levels={"split-tie": "off", "partly-wrapped": "error"})
    assert not TreeFactory(findings=settings)(split_tie()).findings
    (finding,) = TreeFactory(findings=settings)(one_block_forgotten()).findings
    assert finding.level == "error"


def test_ranks_that_shard_differently_are_an_error():
    model = healthy()
    other = no_root()
    texts = []
    TreeFactory(gather=lambda text: texts.append(text) or [text]).of_all_ranks(other)
    tree = TreeFactory(gather=lambda text: [text, text, *texts]).of_all_ranks(model)
    assert tree.findings[0].code == "ranks-differ"
    assert tree.findings[0].level == "error"
    assert tree.findings[0].reason.startswith(
        "ranks 0-1 and rank 2 shard the model differently, first in: parameter embed.weight"
    )
    assert not TreeFactory(gather=lambda text: [text, text]).of_all_ranks(model).findings


def never(*, module, recurse, nonwrapped_numel):
    return recurse and module is not None and nonwrapped_numel >= 0


POLICIES = {
    "module classes": ({Block}, BLOCKS),
    "ModuleWrapPolicy": (ModuleWrapPolicy({Block, nn.Embedding}), ("embed", *BLOCKS)),
    "CustomPolicy": (
        CustomPolicy(lambda module: isinstance(module, nn.LayerNorm)),
        tuple(f"{block}.norm" for block in BLOCKS),
    ),
    "transformer": (
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        BLOCKS,
    ),
    "size": (
        functools.partial(size_based_auto_wrap_policy, min_num_params=130),
        tuple(f"{block}.{name}" for block in BLOCKS for name in ("up", "down")),
    ),
    "never": (never, ()),
}


@pytest.mark.parametrize(("policy", "expected"), POLICIES.values(), ids=POLICIES.keys())
def test_a_policy_wraps_what_auto_wrap_wraps(policy, expected):
    answer = TreeFactory().expect(make(), policy)
    assert sorted(answer.expected) == sorted(expected)
    if policy == {Block}:
        policy = ModuleWrapPolicy(policy)
    by_torch = fsdp1(make(), auto_wrap_policy=policy)
    assert set(TreeFactory()(by_torch).module_to_fqns) - {""} == set(expected)
    assert TreeFactory().expect(by_torch, policy)


def test_unmet_expectation_lists_differences():
    answer = TreeFactory().expect(one_block_forgotten(), {Block, nn.Embedding})
    assert not answer
    assert answer.expected == ("embed", *BLOCKS)
    assert str(answer) == "2 not wrapped, although the policy wraps them: embed, layers.1"
    answer = TreeFactory().expect(healthy(), {nn.Linear})
    assert answer.unexpected == BLOCKS
    assert repr(answer) == f"<{answer}>"
    assert answer.missing[:3] == ("layers.0.up", "layers.0.down", "layers.1.up")
    assert str(answer).endswith(
        "; 3 wrapped, although the policy does not wrap them: layers.{0..2}"
    )
    assert str(TreeFactory().expect(healthy(), {Block})) == "all 3 expected modules are wrapped"


def test_models_of_a_dict_may_be_units():
    models = nn.ModuleDict({"teacher": healthy(), "student": one_block_forgotten()})
    expectation = TreeFactory().expect(models, {Block})
    assert str(expectation) == "1 not wrapped, although the policy wraps them: student.layers.1"
    # The blocks of a list are no models.
    blocks = nn.ModuleList(one_block_forgotten().layers)
    assert not TreeFactory().expect(blocks, {Block})


def test_what_is_no_policy_is_refused():
    with pytest.raises(RecordingError) as caught:
        TreeFactory().expect(healthy(), "Block")
    assert str(caught.value) == (
        "fsdp_tree.expect expected an auto-wrap policy (ModuleWrapPolicy, a callable of module, "
        "recurse and nonwrapped_numel, or a set of module classes), got str"
    )
