"""Causes with the trees of the same test as evidence: exact where they speak, silent otherwise."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from sample_profiles import (
    BACKWARD,
    NBYTES,
    accumulated,
    changed,
    counted,
    frozen,
    in_bfloat16,
    kept,
    made,
    profile,
    reduced_often,
    role,
    row,
    sized,
)

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.amounts import Dtype
from pytest_fsdp_comm.comm.explanation.resharding import Freed
from pytest_fsdp_comm.comm.profile import replace_fields
from pytest_fsdp_comm.reports.changes import render_comparison
from pytest_fsdp_comm.snapshots.differences import evidence_of, tree_evidence
from pytest_fsdp_comm.tree.model import Precision
from pytest_fsdp_comm.tree.profile import ParameterFacts, TreeFacts, UnitFacts, merge

UNITS = ("", *(f"layers.{number}" for number in range(3)))


def tree(**changes):
    """A tree of the made-up profiles; `changes` by unit, of its facts or its parameter's."""
    units = {name: UnitFacts(kind="fsdp2", reshard_after_forward=bool(name)) for name in UNITS}
    parameters = {
        f"{name}.weight" if name else "head.weight": ParameterFacts(shape=(4, 4), dtype="float32")
        for name in UNITS
    }
    for name, change in changes.items():
        unit = name.replace("_", ".")
        if unit in parameters:
            parameters[unit] = replace(parameters[unit], **change)
        else:
            units[unit] = replace(units[unit], **change)
    return TreeFacts(world_size=4, mesh_axes=(), units={1: units}, parameters=parameters)


def without_root(facts):
    units = {name: unit for name, unit in facts.units[1].items() if name}
    return replace(facts, units={1: units})


def test_axes_of_units_split_no_work():
    """A unit gathers its parameters before use, so no output has to be reduced over its axis."""
    both = (("dp", "Shard(0)"), ("tp", "Shard(0)"))
    facts = tree(layers_0={"shard_axis": "dp"}, layers_0_weight={"placements": both})
    assert tree_evidence(facts, facts).split_axes["layers.0"] == {"tp"}


def layers(suffix="", **change):
    return {f"layers_{number}{suffix}": change for number in range(3)}


def with_adapter(facts):
    adapter = ParameterFacts(shape=(4, 4), dtype="float32", managed=False)
    return replace(facts, parameters=facts.parameters | {"layers.1.lora.weight": adapter})


def part_reduced(old):
    return changed(
        old,
        lambda one: (
            sized(one, 0.5) if one.owner == "layers.1" and role(one) == "gradients" else one
        ),
    )


NOT_CALLED = "the root's forward is not called, so each unit below becomes a root"


def texts(change, new_tree):
    old = profile(tensor_parallel=True)
    evidence = tree_evidence(tree(), new_tree)
    return [cause.text for cause in compare(old, change(old), evidence=evidence).causes]


@pytest.mark.parametrize(
    ("change", "new_tree", "text"),
    [
        (
            frozen,
            tree(layers_1_weight={"trainable": False}),
            "parameters are frozen, as the tree shows",
        ),
        (
            frozen,
            tree(),
            "the loss no longer depends on the unit, or its gradients are not synchronized: "
            "nothing was frozen, as the tree shows",
        ),
        # Adapters that were attached after fully_shard.
        (
            frozen,
            with_adapter(tree(layers_1_weight={"trainable": False})),
            "parameters are frozen, as the tree shows; no unit reduces the gradients of the "
            "trained parameters inside",
        ),
        (
            part_reduced,
            tree(),
            "some parameters got no gradient: not used, or behind detach() or no_grad(); nothing "
            "was frozen, as the tree shows",
        ),
        (
            kept,
            tree(**layers(reshard_after_forward=False)),
            "reshard_after_forward True -> False, as the tree shows",
        ),
        (kept, tree(**layers(is_root=True)), NOT_CALLED),
        (
            kept,
            without_root(tree(**layers(is_root=True, reshard_after_forward=False))),
            "fully_shard on the root is missing: each unit below becomes a root and keeps its "
            "parameters after forward",
        ),
        (
            in_bfloat16,
            tree(**layers("_weight", dtype="bfloat16")),
            "the dtype of the model's parameters, as the tree shows",
        ),
        (
            in_bfloat16,
            tree(**layers(precision=Precision(param_dtype="bfloat16"))),
            "MixedPrecisionPolicy, as the tree shows",
        ),
    ],
)
def test_the_tree_decides_between_readings(change, new_tree, text):
    assert texts(change, new_tree) == [text]


def test_a_unit_of_another_kind_is_no_lost_root():
    """A module that DDP replicates instead of FSDP2 is a root of its own."""
    new_tree = tree(layers_1={"is_root": True, "kind": "ddp"})
    assert not any("becomes a root" in text for text in texts(kept, new_tree))


def test_replaced_parameters_explain_fewer_gradients():
    """Of parameters that came or went, the tree does not tell whether they were frozen."""
    assert texts(part_reduced, with_adapter(tree())) == []


@pytest.mark.parametrize("is_trained", [True, False])
def test_lost_root_of_an_evaluation_loses_no_gradients(is_trained):
    old = profile() if is_trained else changed(profile(), forward_alone)
    new = changed(old, lambda one: None if one.owner == "" else one)
    gone = without_root(tree(**layers(is_root=True), head_weight={"managed": False}))
    comparison = compare(old, new, evidence=tree_evidence(tree(), gone))
    lost = " or reduced" * is_trained
    unreduced = ", FSDP does not reduce their gradients" * is_trained
    assert [*comparison.sentences] == [
        f"(root) no longer gathered{lost}, gathers of other units unchanged"
    ]
    assert [cause.text for cause in comparison.causes] == [
        f"fully_shard on the root is missing: its parameters are not sharded{unreduced}, and each "
        "unit below becomes a root"
    ]


def forward_alone(one):
    return one if one.phase is Phase.FORWARD else None


@pytest.mark.parametrize(
    ("change", "new_tree", "beginning"),
    [
        # Other layers were frozen than those whose gradients are gone.
        (
            frozen,
            tree(layers_2_weight={"trainable": False}),
            "the loss no longer depends on the unit, or its gradients are not synchronized",
        ),
        # If nothing changed in the tree, the setting did not change either.
        (kept, tree(), "forward may run without the unit's hooks"),
        (in_bfloat16, tree(), "an fsdp_pre_all_gather hook of the weights"),
        (reduced_often, tree(layers_1_weight={"trainable": False}), "reduced in each micro-batch"),
    ],
)
def test_unrelated_tree_does_not_change_causes(change, new_tree, beginning):
    (text,) = texts(change, new_tree)
    assert text.startswith(beginning)


def not_ahead(old):
    return changed(old, lambda one: replace(one, calls=tuple(replace_fields(one.calls, ahead=0))))


@pytest.mark.parametrize(
    ("new_tree", "said"),
    [
        (tree(), []),
        (tree(**layers(forward_prefetch=("head",))), []),
        (tree(**layers(backward_prefetch=("head",))), ["less backward prefetching"]),
    ],
)
def test_unchanged_lists_are_no_cause(new_tree, said):
    assert [text.partition(" (")[0] for text in texts(not_ahead, new_tree)] == said


def with_later_gathers(old):
    """The first layer is no longer prefetched, and the last one even earlier."""
    ahead = {"layers.0": 0, "layers.2": 2}

    def change(one):
        if one.what != "all_gather" or one.phase is not BACKWARD or one.owner not in ahead:
            return one
        return replace(one, calls=tuple(replace_fields(one.calls, ahead=ahead[one.owner])))

    return changed(old, change)


@pytest.mark.parametrize(
    ("before", "how"), [((), "is now called"), (("layers.2",), "lists different modules")]
)
def test_a_first_list_of_modules_is_a_new_call(before, how):
    old_tree, new_tree = (
        tree(layers_1={"backward_prefetch": listed}) for listed in (before, ("layers.0",))
    )
    evidence = tree_evidence(old_tree, new_tree)
    comparison = compare(profile(), with_later_gathers(profile()), evidence=evidence)
    assert [cause.text for cause in comparison.causes] == [
        f"set_modules_to_backward_prefetch {how}, as the tree shows"
    ]


@pytest.mark.parametrize(
    ("new_tree", "is_said"),
    [
        (tree(), True),
        (tree(layers_2_weight={"placements": (("tp", "Shard(1)"),)}), True),
        (tree(layers_1_weight={"placements": (("tp", "Replicate()"),)}), True),
        (tree(layers_1_weight={"placements": (("tp", "Shard(1)"),)}), False),
    ],
)
def test_other_shards_of_its_parameters_explain_a_redistribution(new_tree, is_said):
    moved = [
        counted("redistribution", Phase.FORWARD, "layers.1", "(Partial(sum))->(Replicate())"),
        row(Phase.FORWARD, "layers.1", "all_reduce", 64, axis="tp"),
    ]
    tensor_parallel = profile(tensor_parallel=True)
    evidence = tree_evidence(tree(), new_tree)
    new = profile(tensor_parallel=True, extra=[moved])
    comparison = compare(tensor_parallel, new, evidence=evidence)
    assert any("parallelize_module" in cause.text for cause in comparison.causes) is is_said


@pytest.mark.parametrize("is_of_all", [True, False])
def test_reductions_of_some_units_are_not_reached_by_the_call(is_of_all):
    def change(one):
        is_counted = one.what == "reduce_scatter" and (is_of_all or one.owner)
        calls = (replace(call, count=4) for call in one.calls)
        return replace(one, calls=tuple(calls)) if is_counted else one

    old = accumulated(profile())
    (cause,) = compare(old, changed(old, change)).causes
    reaches = "set_requires_gradient_sync(False) does not reach these units (e.g. recurse=False)"
    assert (reaches in cause.text) is not is_of_all


@pytest.mark.parametrize("into", [True, False])
def test_8_bit_weights_may_have_a_gather_hook(into):
    sides = [profile(), in_dtype(profile(), "float8_e4m3fn", roles=("parameters",))]
    comparison = compare(*(sides if into else sides[::-1]))
    assert [cause.text for cause in comparison.causes] == [
        "an fsdp_pre_all_gather hook of the weights, such as torchao's float8 all-gather, "
        "MixedPrecisionPolicy, or the dtype of the model's parameters"
    ]


def test_a_tree_with_other_units_says_nothing():
    old = profile(tensor_parallel=True)
    other = replace(tree(), units={1: {}}, parameters={})
    evidence = tree_evidence(other, other)
    assert [cause.text[:31] for cause in compare(old, frozen(old), evidence=evidence).causes] == [
        "parameters are frozen or detach"
    ]


def test_unused_units_lose_no_gradients():
    # As after `set_unshard_in_backward(False)` on a frozen unit.
    def freeze(old):
        return changed(
            old,
            lambda one: (
                None if one.owner == "layers.1" and one.calls[0].role == "gradients" else one
            ),
        )

    def spare(old):
        return changed(
            old,
            lambda one: (
                None
                if one.owner == "layers.1"
                and one.phase is BACKWARD
                and (one.what == "all_gather" or one.subject == "reshard")
                else one
            ),
        )

    old = freeze(profile())
    comparison = compare(old, spare(old), evidence=tree_evidence(tree(), tree()))
    assert comparison.sentences == ("layers.1 no longer gathered in backward",)
    assert [cause.text for cause in comparison.causes] == [
        "the units' inputs no longer need gradients, so backward no longer runs through them, or "
        "set_unshard_in_backward(False) is now called on them"
    ]


def in_dtype(old, dtype, *, roles, version=""):
    """With calls of some roles in another element type, recorded with a version of torch."""

    def change(one):
        if role(one) not in roles:
            return one
        factor = {"bfloat16": Fraction(1, 2), "float8_e4m3fn": Fraction(1, 4)}.get(dtype, 2)
        calls = (replace(calls, dtype=dtype) for calls in sized(one, factor).calls)
        return replace(one, calls=tuple(calls))

    return replace(changed(old, change, ["collective"]), torch_version=version)


HALF = in_dtype(profile(), "bfloat16", roles=("parameters", "gradients"), version="2.13.0+cpu")
FULL = in_dtype(HALF, "float32", roles=("gradients",), version="2.15.0+cu130")
UNSET = "since torch 2.15, FSDP2 reduces in float32, not bfloat16"
KEEPS = "pass reduce_dtype=torch.bfloat16 to keep the bytes"
# As of DDP, whose communication hook may have gone: of it nothing is gathered.
HOOKED = made([row(BACKWARD, "", "all_reduce", NBYTES, "gradients", dtype="bfloat16")])


@pytest.mark.parametrize(
    ("old", "new", "is_torchs"),
    [
        (HALF, FULL, True),
        (FULL, HALF, True),
        # The same change is the user's where both versions reduce alike.
        (HALF, replace(FULL, torch_version="2.14.1"), False),
        (replace(HALF, torch_version="2.15.0"), FULL, False),
        (replace(HALF, torch_version=""), FULL, False),
        # Parameters too, or in the other direction: torch changed nothing of that.
        (HALF, in_dtype(FULL, "float32", roles=("parameters",), version="2.15.0"), False),
        (FULL, replace(HALF, torch_version="2.16.0"), False),
        (replace(FULL, torch_version="2.13.0"), replace(HALF, torch_version="2.15.0"), False),
        (
            replace(HOOKED, torch_version="2.13.0"),
            in_dtype(HOOKED, "float32", roles=("gradients",), version="2.15.0"),
            False,
        ),
    ],
)
def test_newer_torch_reduces_gradients_in_float32(old, new, is_torchs):
    causes = [cause.text for cause in compare(old, new).causes]
    assert any(UNSET in text for text in causes) is is_torchs
    assert bool(causes)


def in_half(**precision):
    """A tree whose units all have mixed precision, as the marks of one unit would say it."""
    names = [name.replace(".", "_") for name in UNITS]
    return tree(**{name: {"precision": Precision(**precision)} for name in names})


def of_fsdp1(facts):
    units = {name: replace(unit, kind="fsdp1") for name, unit in facts.units[1].items()}
    return replace(facts, units={1: units})


HALF_TREE = in_half(param_dtype="bfloat16")
SET_TREE = in_half(param_dtype="bfloat16", reduce_dtype="float32")


@pytest.mark.parametrize(
    ("was", "now", "text"),
    [
        (None, None, f"reduce_dtype was changed, or is unset: {UNSET}; {KEEPS}"),
        (HALF_TREE, HALF_TREE, f"reduce_dtype is unset, as the tree shows: {UNSET}; {KEEPS}"),
        (HALF_TREE, SET_TREE, "MixedPrecisionPolicy, as the tree shows"),
        # FSDP1 reduces in param_dtype with every torch; a hook does as it likes.
        (
            of_fsdp1(HALF_TREE),
            of_fsdp1(HALF_TREE),
            "a communication hook, or a manual cast of gradients",
        ),
        (SET_TREE, SET_TREE, "a communication hook, or a manual cast of gradients"),
    ],
)
def test_tree_decides_if_torch_changed_reductions(was, now, text):
    evidence = None if was is None else tree_evidence(was, now)
    (cause,) = compare(HALF, FULL, evidence=evidence).causes
    assert cause.text.startswith(text)


def test_version_page_has_the_reported_cause():
    page = Path(__file__).parents[3] / "docs" / "torch-versions.md"
    (cause,) = compare(HALF, FULL, evidence=tree_evidence(HALF_TREE, HALF_TREE)).causes
    assert f"\n  likely: {cause.text}\n" in page.read_text()


def test_remedy_is_the_dtype_of_the_snapshot():
    (cause,) = compare(FULL, HALF).causes
    assert cause.text.endswith("not bfloat16; pass reduce_dtype=torch.float32 to keep the bytes")


def test_partial_gradients_ignore_reduce_dtype():
    partial = [
        row(BACKWARD, "layers.0", "all_reduce", 64, "gradients", axis="tp", dtype="bfloat16")
    ]
    old = replace(made([*HALF.rows, *partial]), torch_version="2.13.0")
    wide = [row(BACKWARD, "layers.0", "all_reduce", 128, "gradients", axis="tp")]
    new = replace(made([*HALF.rows, *wide]), torch_version="2.15.0")
    text = (
        "since torch 2.15, FSDP2 casts partial gradients to reduce_dtype or the parameter dtype "
        "first, so DTensor reduces them over tp in float32, not bfloat16"
    )
    for evidence in (None, tree_evidence(SET_TREE, SET_TREE)):
        assert [cause.text for cause in compare(old, new, evidence=evidence).causes] == [text]
    assert UNSET not in compare(old, new).causes[0].text


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        (None, "MixedPrecisionPolicy, autocast, or a manual cast"),
        (tree_evidence(SET_TREE, SET_TREE), "autocast, or a manual cast"),
        (tree_evidence(tree(), SET_TREE), "MixedPrecisionPolicy, as the tree shows"),
    ],
)
def test_partial_gradients_in_bfloat16_are_cast(evidence, text):
    old, new = (
        made([*HALF.rows, row(BACKWARD, "layers.0", "all_reduce", size, "gradients", **options)])
        for size, options in ((128, {"axis": "tp"}), (64, {"axis": "tp", "dtype": "bfloat16"}))
    )
    assert [cause.text for cause in compare(old, new, evidence=evidence).causes] == [text]


def test_changes_of_the_user_precede_those_of_torch():
    new = kept(FULL)
    comparison = compare(HALF, replace(new, torch_version="2.15.0"))
    assert [cause.text.split()[0] for cause in comparison.causes] == [
        *("reshard_after_forward", "reduce_dtype"),
    ]
    assert [*map(type, comparison.reported)] == [Freed, Dtype]
    first = render_comparison(comparison, snapshot="s").changes[0]
    assert first.text.startswith("layers.{0..2} no longer resharded")
    # With one version, the order is that of the steps.
    alike = compare(HALF, replace(new, torch_version="2.13.0"))
    assert [*map(type, alike.reported)] == [Dtype, Freed]


def clipped(old, change="(_NormPartial(2.0))->(Replicate())"):
    """With a norm of the gradients in the optimizer's phase."""
    rows = [
        row(Phase.OPTIMIZER, None, "all_reduce", 4),
        counted("redistribution", Phase.OPTIMIZER, None, change),
    ]
    return made([*old.rows, *rows])


GATHERED = "full_tensor() or redistribute()"
OTHERWISE = (
    "norms of gradients or weights are no longer computed, or computed otherwise, e.g. with "
    "another norm_type"
)


def logged(old):
    """With DTensors that are gathered whole beside the step."""
    rows = [
        row(Phase.OUTSIDE, None, "all_gather", 4),
        counted("redistribution", Phase.OUTSIDE, None, "(Shard(dim=0))->(Replicate())"),
    ]
    return made([*old.rows, *rows])


@pytest.mark.parametrize(
    ("old", "new", "beginnings"),
    [
        (clipped(profile()), profile(), ["norms of gradients or weights are no longer computed"]),
        (
            profile(),
            clipped(profile()),
            ["norms of gradients or weights are now computed, e.g. by clip_grad_norm_"],
        ),
        (
            clipped(profile(), "(Replicate(),_NormPartial(2.0))->(Replicate(),Replicate())"),
            profile(),
            ["norms of gradients or weights are no longer computed: is clip_grad_norm_"],
        ),
        # They may be computed of gradients that are gathered whole.
        (clipped(profile()), logged(profile()), [OTHERWISE, GATHERED]),
        # An optimizer that gathers for another reason clips nothing.
        (clipped(profile(), "(Partial(sum))->(Replicate())"), profile(), []),
    ],
)
def test_removed_clipping_comes_first(old, new, beginnings):
    causes = [cause.text for cause in compare(old, new).causes]
    assert len(causes) == len(beginnings)
    assert all(text.startswith(begin) for text, begin in zip(causes, beginnings, strict=True))
    both = compare(clipped(in_bfloat16(profile())), profile())
    assert both.causes[0].text.startswith("norms of gradients or weights are no longer computed")


def test_frozen_module_outside_all_units_is_known():
    old = with_adapter(tree())
    adapter = replace(old.parameters["layers.1.lora.weight"], trainable=False)
    new = replace(old, parameters=old.parameters | {"layers.1.lora.weight": adapter})
    no_units = [replace(facts, units={1: {}}) for facts in (old, new)]
    assert tree_evidence(*no_units).frozen == {"layers.1.lora"}


def test_trees_without_a_union_are_no_evidence():
    equal = merge({0: tree(), 1: tree()})
    apart = merge({0: tree(), 1: tree(layers_0_weight={"dtype": "bfloat16"})})
    assert evidence_of([(equal, equal)]) is not None
    assert evidence_of([(equal, apart)]) is evidence_of([(apart, equal)]) is None


@pytest.mark.parametrize(
    ("new_tree", "added", "removed"),
    [
        (
            None,
            "parameters were added or enlarged, or are no longer frozen",
            "parameters were removed, made smaller or frozen",
        ),
        ({"trainable": False}, "", "parameters are frozen, as the tree shows"),
        ({"shape": (8, 8)}, "", ""),
        ({}, "", ""),
    ],
)
def test_buckets_of_another_size_have_a_cause(new_tree, added, removed):
    def bucket(nbytes):
        return made([row(BACKWARD, "", "all_reduce", nbytes, "gradients")])

    evidence = None
    if new_tree is not None:
        evidence = tree_evidence(tree(), tree(layers_1_weight=new_tree))
    for sizes, which, cause in (((64, 96), "more", added), ((96, 64), "fewer", removed)):
        comparison = compare(*map(bucket, sizes), evidence=evidence)
        old, new = sizes
        assert comparison.sentences == (
            f"{which} gradients are now reduced: (root) {old} -> {new} B per call",
        )
        assert [each.text for each in comparison.causes] == [cause] * bool(cause)
