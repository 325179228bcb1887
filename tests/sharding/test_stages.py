"""Parts of one model, such as the stages of a pipeline, make one tree with several roots."""

import pytest
from models import WIDTH, Block
from texts import parse_trees
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from pytest_fsdp_comm import RecordingError
from pytest_fsdp_comm.fsdp_tree import TreeFactory
from pytest_fsdp_comm.sharding.capture import capture_tree
from pytest_fsdp_comm.snapshots.tree_text import format_profile
from pytest_fsdp_comm.tree.model import dump_tree, load_tree
from pytest_fsdp_comm.tree.profile import fold, merge, ranks_of_stages, tree_facts

pytestmark = pytest.mark.usefixtures("four_ranks")


class Stage(nn.Module):
    """Some blocks of a model, with their names in the whole model."""

    def __init__(self, numbers, *, embed=False, head=False):
        super().__init__()
        if embed:
            self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleDict({str(number): Block() for number in numbers})
        if head:
            self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def sharded(stage, *, root=True, **policy):
    for layer in stage.layers.values():
        fully_shard(layer, **policy)
    return fully_shard(stage, **policy) if root else stage


@pytest.fixture
def stages():
    return [sharded(Stage([0, 1], embed=True)), sharded(Stage([6, 7], head=True))]


def test_each_part_is_root_with_relative_names(stages):
    tree = capture_tree(stages)
    assert [node.class_name for node in tree.modules if node.parent is None] == ["Stage", "Stage"]
    assert [name for name, _ in tree.named_parameters()] == [
        "embed.weight",
        *(f"layers.{n}.{name}.weight" for n in (0, 1) for name in ("up", "down")),
        *(f"layers.{n}.{name}.weight" for n in (6, 7) for name in ("up", "down")),
        "head.weight",
    ]
    names = [tree.unit_name(index) for index in range(len(tree.units))]
    assert names == ["", "layers.0", "layers.1", "", "layers.6", "layers.7"]
    assert [unit.is_root for unit in tree.units] == [True, False, False] * 2
    managed = tree.module_to_fqns
    assert managed[""] == ("embed.weight", "head.weight")
    assert managed["layers.6"] == ("layers.6.up.weight", "layers.6.down.weight")
    assert not tree.findings


def test_a_list_of_one_part_is_that_part(stages):
    assert capture_tree(stages[:1]) == capture_tree(stages[0])


def test_every_form_shows_all_parts(stages, capsys, tmp_path):
    tree = capture_tree(stages)
    lines = str(tree).splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["[Stage] FULLY SHARDED"] * 2
    assert "        layers.7[Block] FULLY SHARDED" in lines
    fsdp_tree = TreeFactory()
    fsdp_tree.show(tree)
    shown = capsys.readouterr().out
    assert shown.count("(root) [Stage]") == 2
    assert "{0,1}" in shown or "{0..1}" in shown
    assert "{6..7}" in shown
    fsdp_tree.save(tree, tmp_path / "tree.html")
    page = (tmp_path / "tree.html").read_text()
    assert page.count("(root)") >= 2
    assert load_tree(dump_tree(tree)) == tree
    text = format_profile(fold(tree))
    assert parse_trees(text) == fold(tree)
    assert text.count("(root)") == 2


def test_part_without_root_unit_is_one_finding():
    parts = [sharded(Stage([0, 1], embed=True)), sharded(Stage([6, 7]), root=False)]
    (finding,) = capture_tree(parts).findings
    assert (finding.code, finding.fqns) == ("no-root-unit", ("layers.6", "layers.7"))
    # One unit without a root around it is its own.
    assert not capture_tree([parts[0], sharded(Stage([6]), root=False)]).findings


def holder(stages, *, runs):
    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x

    model = type("Holder", (nn.Module,), {"forward": forward} if runs else {})()
    model.stages = nn.ModuleList(stages)
    return model


@pytest.mark.parametrize("runs", [True, False])
def test_stages_of_model_need_no_common_root(stages, runs):
    assert not capture_tree(holder(stages, runs=runs)).findings
    assert not capture_tree(nn.ModuleList(stages)).findings
    assert not capture_tree(nn.ModuleDict({"first": stages[0], "last": stages[1]})).findings
    # Without units inside them too, as long as nothing runs them one after the other.
    whole = holder([fully_shard(Stage([0, 1])), fully_shard(Stage([2, 3]))], runs=runs)
    assert codes(whole) == (["no-root-unit"] if runs else [])


def codes(model):
    return [finding.code for finding in capture_tree(model).findings]


def test_blocks_and_loose_parameters_need_a_root():
    def build():
        model = Stage([0, 1], head=True)
        for layer in model.layers.values():
            fully_shard(layer.up)
            fully_shard(layer)
        return model

    model = build()
    assert codes(model) == ["no-root-unit", "unmanaged-parameter"]
    model.head.requires_grad_(requires_grad=False)
    assert codes(model) == ["no-root-unit"]
    assert codes(fully_shard(model)) == []
    model = build()
    fully_shard(model.head)
    (finding,) = capture_tree(model).findings
    assert (finding.code, finding.fqns) == ("no-root-unit", ("head", "layers.0", "layers.1"))


@pytest.mark.parametrize(
    "policy", [{Block}, ModuleWrapPolicy({Block}), lambda module, **_: isinstance(module, Block)]
)
def test_a_policy_is_expected_of_each_part(policy, stages):
    if callable(policy) and not isinstance(policy, ModuleWrapPolicy):
        blocks = policy
        policy = lambda module, recurse, **_: recurse or blocks(module)  # noqa: E731  # short
    expectation = TreeFactory().expect(stages, policy)
    assert expectation, str(expectation)
    assert set(expectation.expected) == {f"layers.{n}" for n in (0, 1, 6, 7)}
    assert TreeFactory().expect([stages[0], Stage([6, 7])], policy).missing == (
        "layers.6",
        "layers.7",
    )


def test_fsdp1_stages_are_parts_too():
    parts = [
        FullyShardedDataParallel(Stage(numbers), device_id="cpu", use_orig_params=True)
        for numbers in ([0], [1])
    ]
    tree = capture_tree(parts)
    assert [unit.kind for unit in tree.units] == ["fsdp1", "fsdp1"]
    assert not tree.findings


@pytest.mark.parametrize(
    ("given_", "problem"),
    [
        (
            [],
            "fsdp_tree([]) got an empty list; pass the modules that this rank runs",
        ),
        (
            [nn.Linear(1, 1), None],
            "fsdp_tree(model) expects a torch.nn.Module, or a list of them, got NoneType; pass the "
            "model itself",
        ),
        (
            [nn.Linear(1, 1), nn.Linear(1, 1)],
            "fsdp_tree([...]) expects parts of one model without common parameter names, but two "
            "of them have a parameter named bias; pass several models as fsdp_tree(torch.nn."
            'ModuleDict({"actor": actor, "critic": critic})), which prefixes their names',
        ),
    ],
)
def test_what_are_no_parts_is_refused(given_, problem):
    with pytest.raises(RecordingError) as caught:
        capture_tree(given_)
    assert str(caught.value) == problem


def test_merged_ranks_of_a_pipeline_show_their_stages():
    first = tree_facts(capture_tree(sharded(Stage([0, 1], embed=True))))
    second = tree_facts(capture_tree(sharded(Stage([2, 3], head=True))))
    text = format_profile(merge({0: first, 1: first, 2: second, 3: second}))
    assert "ranks 0-1\n" in text
    assert "ranks 2-3\n" in text
    assert parse_trees(text).restrict([2]).common == second


def test_only_ranks_of_one_stage_are_compared():
    first, second, kept = (
        sharded(Stage([0, 1], embed=True)),
        sharded(Stage([2, 3], head=True)),
        sharded(Stage([2, 3], head=True), reshard_after_forward=False),
    )

    def sent(model):
        texts = []
        TreeFactory(gather=lambda text: texts.append(text) or [text]).of_all_ranks(model)
        return texts[0]

    def findings(*models, ranks=()):
        texts = [sent(model) for model in models]
        return TreeFactory(gather=lambda _: texts, ranks=ranks).of_all_ranks(models[0]).findings

    assert not findings(first, first, second, second)
    (finding,) = findings(first, second, kept, ranks=(0, 2, 3))
    assert finding.code == "ranks-differ"
    # Ranks have their own numbers.
    assert finding.reason.startswith("rank 2 and rank 3 shard the model differently")
    facts = [tree_facts(capture_tree(model)) for model in (first, second, kept)]
    assert ranks_of_stages({0: facts[0], 3: facts[1], 5: facts[0], 9: facts[2]}) == [[0, 5], [3, 9]]
