"""Write and read snapshots of trees, and name the broken line of others."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from texts import format_tree, parse_tree, parse_trees

from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.errors import SnapshotFormatError
from pytest_fsdp_comm.snapshots.tree_text import format_profile
from pytest_fsdp_comm.tree.diff import TreeChange, compare, compare_trees
from pytest_fsdp_comm.tree.model import (
    AxisPlacement,
    ModuleNode,
    ParameterNode,
    Precision,
    ShardTree,
    ShardUnit,
)
from pytest_fsdp_comm.tree.profile import TreeProfile, fold, merge, tree_facts

AXES = (
    MeshAxis(name="dp", size=2, dims=((2, 2),)),
    MeshAxis(name="tp ]=,", size=2, dims=((2, 1),)),
)
NAMES = st.one_of(
    st.sampled_from(["0", "1", "2", "10", "weight", "tied", "a b", "{0}", "#", "(root)", "x,y"]),
    st.text(min_size=1).filter(lambda name: "." not in name),
)
DTYPES = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])
PLACEMENTS = st.lists(
    st.sampled_from(AXES).flatmap(
        lambda axis: st.sampled_from(
            [
                AxisPlacement(axis=axis.name, size=axis.size, kind="shard", dim=0, text="Shard(0)"),
                AxisPlacement(axis=axis.name, size=axis.size, kind="replicate", text="Replicate()"),
            ]
        )
    ),
    max_size=2,
).map(tuple)
RESHARD = st.one_of(st.none(), st.booleans(), st.integers(2, 64))


@st.composite
def trees(draw):
    """Trees of a few modules, with units anywhere and names of any characters."""
    modules = [ModuleNode(name="", parent=None, depth=0, class_name="Model")]
    for _ in range(draw(st.integers(0, 6))):
        parent = draw(st.integers(0, len(modules) - 1))
        taken = {node.name for node in modules if node.parent == parent}
        name = draw(NAMES.filter(lambda name, taken=taken: name not in taken))
        depth = modules[parent].depth + 1
        modules.append(ModuleNode(name=name, parent=parent, depth=depth, class_name="Block"))
    parameters = []
    used = {(node.parent, node.name) for node in modules}
    for _ in range(draw(st.integers(0, 8))):
        slot = draw(st.tuples(st.integers(0, len(modules) - 1), NAMES))
        if slot not in used:
            used.add(slot)
            parameters.append(draw(parameter_nodes(slot)))
    owners = st.lists(st.sampled_from(range(len(modules))), min_size=1, max_size=2, unique=True)
    units = [draw(shard_units(tuple(draw(owners)))) for _ in range(draw(st.integers(0, 3)))]
    return ShardTree(
        rank=0,
        world_size=4,
        backend="gloo",
        torch_version="2.13.0",
        mesh_axes=AXES,
        modules=tuple(modules),
        parameters=tuple(parameters),
        units=tuple(units),
    )


@st.composite
def parameter_nodes(draw, slot):
    return ParameterNode(
        module=slot[0],
        name=slot[1],
        tied=draw(st.sampled_from([(), ((0, "tied to"),)])),
        shape=tuple(draw(st.lists(st.integers(0, 99), max_size=3))),
        dtype=draw(DTYPES),
        itemsize=4,
        placements=draw(PLACEMENTS),
        local_numel=1,
        trainable=draw(st.booleans()),
        device="cpu",
        unit=draw(st.sampled_from([None, 0])),
    )


@st.composite
def shard_units(draw, modules):
    axis = st.one_of(st.none(), st.sampled_from(AXES))
    return ShardUnit(
        kind=draw(st.sampled_from(["fsdp2", "fsdp1", "replicate", "ddp"])),
        modules=modules,
        parameters=(),
        is_root=draw(st.booleans()),
        shard_axis=draw(axis),
        replicate_axis=draw(axis),
        reshard_after_forward=draw(RESHARD),
        precision=Precision(
            param_dtype=draw(st.one_of(st.none(), DTYPES, st.just("bfloat16+float32"))),
            cast_forward_inputs=draw(st.booleans()),
        ),
        offload=draw(st.booleans()),
        gradient_divide_factor=draw(st.one_of(st.none(), st.floats(allow_nan=False))),
        force_sum_reduction=draw(st.booleans()),
        forward_prefetch=draw(st.sampled_from([(), (0,)])),
        prefetch=draw(st.sampled_from(["", "BACKWARD_PRE FORWARD"])),
        nbytes_gathered=0,
        nbytes_padding=0,
        nbytes_kept=0,
    )


@given(trees())
def test_text_round_trips(tree):
    text = format_tree(tree)
    facts = parse_tree(text, where="x.comm")
    assert facts == tree_facts(tree)
    assert compare_trees(facts, tree_facts(tree)) == ()


# Of a world of four; also such as the fake backend records, which leave some out.
RANKS = st.sets(st.integers(0, 3), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


@given(st.data(), RANKS)
def test_trees_of_ranks_round_trip(data, ranks):
    shapes = data.draw(st.lists(trees(), min_size=1, max_size=3))
    facts = {rank: tree_facts(data.draw(st.sampled_from(shapes))) for rank in ranks}
    profile = merge(facts)
    text = format_profile(profile)
    found = parse_trees(text)
    assert found == parse_trees(text.replace("\n", "\r\n")) == profile
    assert {rank: found.restrict([rank]).common for rank in ranks} == facts
    assert found.recorded_ranks == (() if len(ranks) == found.world_size else ranks)
    assert format_profile(found).partition("\n")[2] == text.partition("\n")[2]
    assert not compare(found, profile)
    assert compare(found, profile) == ()


def naively_merged(facts):
    """Each tree with all ranks that have an equal one, found by comparing each with each."""
    alike = {tuple(rank for rank in facts if facts[rank] == tree): tree for tree in facts.values()}
    world_size = next(iter(facts.values())).world_size
    return TreeProfile(
        trees={() if len(ranks) == len(facts) else ranks: tree for ranks, tree in alike.items()},
        recorded_ranks=() if len(facts) == world_size else tuple(facts),
    )


@given(st.data(), RANKS)
def test_trees_are_merged_as_each_with_each(data, ranks):
    shapes = data.draw(st.lists(trees(), min_size=1, max_size=3))
    drawn = [data.draw(st.sampled_from(shapes)) for _ in range(4)]
    shared = [tree_facts(tree) for tree in shapes]
    # Some ranks share an object, some have an equal one of their own.
    facts = {
        rank: shared[shapes.index(tree)] if data.draw(st.booleans()) else tree_facts(tree)
        for rank, tree in enumerate(drawn)
    }
    whole = merge(facts)
    assert whole == naively_merged(facts)
    part = naively_merged({rank: facts[rank] for rank in ranks})
    assert whole.restrict(ranks) == part
    # In the order of their lowest ranks, which `==` does not see.
    assert list(whole.restrict(ranks).trees) == list(part.trees)


@given(trees(), trees())
def test_a_part_is_compared_with_its_own(first, second):
    one, other = tree_facts(first), tree_facts(second)
    whole = merge({0: one, 1: other, 2: one, 3: other})
    assert not compare(whole, merge({0: one}))
    assert not compare(whole, merge({1: other}))
    assert not compare(whole, merge({0: one, 3: other}))
    assert bool(compare(whole, merge({1: one}))) == (one != other)
    assert bool(compare(whole, merge(dict.fromkeys(range(4), one)))) == (one != other)


@given(trees())
def test_one_rank_has_the_tree_that_all_have(tree):
    assert fold(tree).common == tree_facts(tree)
    assert fold(tree).recorded_ranks == (0,)


@given(trees(), st.randoms())
def test_order_of_construction_does_not_show(tree, random):
    parameters = list(tree.parameters)
    random.shuffle(parameters)
    shuffled = dataclasses.replace(tree, parameters=tuple(parameters))
    assert format_tree(shuffled) == format_tree(tree)


@given(trees(), trees())
def test_diff_is_empty_only_for_equal_texts(first, second):
    old, new = tree_facts(first), tree_facts(second)
    same = format_tree(first) == format_tree(second)
    assert (compare_trees(old, new) == ()) == same
    assert bool(compare_trees(new, old)) == bool(compare_trees(old, new))


DOCUMENT = """\
# pytest-fsdp-comm 2 tree | torch 2.13.0, gloo (not compared)
world_size 4
mesh dp=4 stride 1
unit (root) fsdp2 root shard=dp reshard_after_forward=false
unit layers.{0..3} fsdp2 shard=dp reshard_after_forward=true param_dtype=bfloat16
parameter embed.weight float32[512,64] dp=Shard(0) tied=head.weight
parameter layers.{0..3}.weight float32[64,64] dp=Shard(0)
total 5 units, 5 parameters
end
"""
REMEDY = (
    ". Nothing was overwritten: restore the file with `git checkout`, or delete it and record it "
    "again with --snapshot-update"
)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "reshard_after_forward=true",
            "reshard",
            "line 5: it reads 'unit layers.{0..3} fsdp2 shard=dp reshard param_dtype=bfloat16': "
            "unknown policy 'reshard'; expected something like reshard_after_forward=true",
        ),
        (
            "reshard_after_forward=true",
            "reshard_after_forward=maybe",
            "line 5: it reads 'unit layers.{0..3} fsdp2 shard=dp reshard_after_forward=maybe "
            "param_dtype=bfloat16'; expected reshard_after_forward=true, =false or =<number of "
            "ranks>",
        ),
        (
            "float32[512,64]",
            "float32",
            "line 6: it reads 'parameter embed.weight float32 dp=Shard(0) tied=head.weight'; "
            "expected 'parameter embed.weight float32[] dp=Shard(0) tied=head.weight'",
        ),
        (
            "parameter embed.weight float32[512,64] dp=Shard(0) tied=head.weight\n",
            "",
            "line 7: it reads 'total 5 units, 5 parameters'; the totals do not match the "
            "lines above: one was lost or edited by hand; expected 'total 5 units, 4 parameters'",
        ),
        (
            "unit layers.{0..3}",
            "unit (root)",
            "line 4: it reads 'unit (root) fsdp2 root shard=dp reshard_after_forward=false'; "
            "expected 'unit (root) fsdp2 shard=dp reshard_after_forward=true param_dtype=bfloat16'",
        ),
        (
            "parameter embed",
            "parametre embed",
            "line 6: it reads 'parametre embed.weight float32[512,64] dp=Shard(0) "
            "tied=head.weight'; expected 'unit ...', 'parameter ...' or 'total ...'",
        ),
    ],
)
def test_a_broken_document_is_refused_with_its_line(old, new, problem):
    assert DOCUMENT.count(old) == 1 or old == "dp=Shard(0)\n"
    with pytest.raises(SnapshotFormatError) as caught:
        parse_tree(DOCUMENT.replace(old, new), where="x.comm")
    assert str(caught.value) == f"x.comm, {problem}{REMEDY}"


LINES = DOCUMENT.splitlines(keepends=True)


@pytest.mark.parametrize("end", ["", "end\n"])
@pytest.mark.parametrize("kept", range(len(LINES) - 1))
def test_truncated_documents_are_refused(kept, end):
    document = "".join([*LINES[:kept], end])
    with pytest.raises(SnapshotFormatError, match=r"^x\.comm"):
        parse_tree(document, where="x.comm")


def changes(old, new):
    return [
        str(change)
        for change in compare_trees(parse_tree(DOCUMENT), parse_tree(DOCUMENT.replace(old, new)))
    ]


def test_diff_replicated_parameter_is_one_change():
    assert changes(
        "layers.{0..3}.weight float32[64,64] dp=Shard(0)",
        "layers.{0..3}.weight float32[64,64] dp=Replicate()",
    ) == ["layers.{0..3}.weight: Shard(0) over dp -> Replicate() over dp"]


def test_diff_names_only_block_that_stays_unsharded():
    document = DOCUMENT.replace(
        "unit layers.{0..3} fsdp2 shard=dp reshard_after_forward=true param_dtype=bfloat16\n",
        "unit layers.{0..1,3} fsdp2 shard=dp reshard_after_forward=true param_dtype=bfloat16\n"
        "unit layers.2 fsdp2 shard=dp reshard_after_forward=false param_dtype=bfloat16\n",
    )
    assert compare_trees(parse_tree(DOCUMENT), parse_tree(document)) == (
        TreeChange(subject="layers.2", what="reshard_after_forward True -> False"),
    )


def test_a_missing_root_is_named():
    document = (
        DOCUMENT.replace("unit (root) fsdp2 root shard=dp reshard_after_forward=false\n", "")
        .replace("fsdp2 shard=dp reshard_after_forward=true", "fsdp2 root shard=dp")
        .replace("float32[512,64] dp=Shard(0)", "float32[512,64] unmanaged")
        .replace("5 units", "4 units")
    )
    document = document.replace("root shard=dp", "root shard=dp reshard_after_forward=false")
    found = compare_trees(parse_tree(DOCUMENT), parse_tree(document))
    assert [f"{change.subject}: {change.what}" for change in found] == [
        "(root): is no longer a unit (fsdp2)",
        "layers.{0..3}: becomes a root",
        "layers.{0..3}: reshard_after_forward True -> False",
        "embed.weight: Shard(0) over dp -> a plain tensor",
        "embed.weight: no longer managed by a unit",
    ]
    assert [bool(change.likely) for change in found] == [False, True, False, False, False]
    assert found[1].likely.startswith("fully_shard on the root is missing")


def rename_weights(*names, **fields):
    """Return the changes if the layers' weights get other names, and fields such as a shape."""
    old = parse_tree(DOCUMENT)
    parameters = {}
    for name, facts in old.parameters.items():
        is_layer = name.startswith("layers.")
        for new in names if is_layer else [""]:
            changed = dataclasses.replace(facts, **fields) if is_layer else facts
            parameters[name.replace(".weight", new) if new else name] = changed
    return [*map(str, compare_trees(old, dataclasses.replace(old, parameters=parameters)))]


def test_moved_parameters_are_one_change():
    assert rename_weights(".base.weight", trainable=False) == [
        "layers.{0..3}.weight: now below base",
        "layers.{0..3}.weight: trainable -> frozen",
    ]
    old = parse_tree(DOCUMENT)
    moved = {f"model.{name}": facts for name, facts in old.parameters.items()}
    new = dataclasses.replace(old, parameters=moved)
    lines = [str(change) for change in compare_trees(new, old)]
    assert "model.layers.{0..3}.weight: no longer below model" in lines


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        ([".first.weight", ".second.weight"], {}),  # either may be the old one
        ([".base.weight"], {"shape": (64, 8)}),
        ([".scale"], {}),
        ([".weight", ".base.weight"], {}),  # an additional parameter
    ],
)
def test_other_parameters_have_not_moved(names, fields):
    lines = rename_weights(*names, **fields)
    assert lines
    assert "below" not in str(lines)


def test_every_other_change_has_its_words():
    assert changes("world_size 4\nmesh dp=4 stride 1", "world_size 8\nmesh dp=8 stride 1") == [
        "world_size: 4 -> 8",
        "mesh: dp=4 stride 1 -> dp=8 stride 1",
    ]
    assert changes("dp=4 stride 1", "dp=2 stride 2") == ["mesh: dp=4 stride 1 -> dp=2 stride 2"]
    assert changes(
        "param_dtype=bfloat16",
        "reduce_dtype=float32 offload gradient_divide_factor=8.0 force_sum_reduction",
    ) == [
        "layers.{0..3}: param_dtype bfloat16 -> None",
        "layers.{0..3}: reduce_dtype None -> float32",
        "layers.{0..3}: shards move to host memory",
        "layers.{0..3}: gradient_divide_factor None -> 8.0",
        "layers.{0..3}: force_sum_reduction False -> True",
    ]
    assert changes("fsdp2 root shard=dp", "fsdp1 root shard=dp replicate=pp") == [
        "(root): sharded by fsdp2 -> fsdp1",
        "(root): sharded over dp -> sharded over dp, replicated over pp",
    ]
    assert changes("float32[512,64] dp", "bfloat16[512,32] frozen dp") == [
        "embed.weight: shape [512, 64] -> [512, 32]",
        "embed.weight: dtype float32 -> bfloat16",
        "embed.weight: trainable -> frozen",
    ]
    assert changes(" tied=head.weight", "") == ["embed.weight: tied with head.weight -> not tied"]
    assert changes("parameter embed.", "parameter encoder.") == [
        "embed.weight: removed, was Shard(0) over dp",
        "encoder.weight: added, Shard(0) over dp",
    ]
    assert changes("unit layers.{0..3}", "unit blocks.{0..3}") == [
        "blocks.{0..3}: is now a unit (fsdp2)",
        "layers.{0..3}: is no longer a unit (fsdp2)",
    ]
