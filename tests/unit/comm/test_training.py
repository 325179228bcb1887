"""What breaks training is told first; changes that look like it are not."""

from dataclasses import replace
from fractions import Fraction

import pytest
from sample_profiles import (
    BACKWARD,
    DP,
    FORWARD,
    NBYTES,
    accumulated,
    changed,
    counted,
    frozen,
    in_bfloat16,
    made,
    more_layers,
    profile,
    renamed,
    role,
    row,
    sized,
    split,
    times,
    twice,
    typed,
    unit,
)

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.evidence import Evidence
from pytest_fsdp_comm.comm.explanation.passes import Redistributed
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import GatheredPeak
from pytest_fsdp_comm.reports.changes import render_comparison
from pytest_fsdp_comm.reports.explanation import write_headline

GRADIENTS = "gradients"
GATES = [row(BACKWARD, f"layers.{n}.gate", "all_reduce", 256, GRADIENTS, axis="tp") for n in (0, 1)]
PARALLEL = profile(tensor_parallel=True)
GATED = made([*PARALLEL.rows, *GATES])
ATTENTION = [
    row(phase, "layers.0.attention", "all_gather", 64, "activations", axis="tp")
    for phase in (FORWARD, BACKWARD)
]


def without(old, *owners, kind="reduce_scatter"):
    """A profile in which some modules no longer reduce gradients by a kind of collective."""

    def change(one):
        return None if one.owner in owners and (one.what, role(one)) == (kind, GRADIENTS) else one

    return changed(old, change)


def fewer(old, *owners):
    """A profile in which half of the gradients of some units are reduced."""

    def change(one):
        return sized(one, 0.5) if one.owner in owners and role(one) == GRADIENTS else one

    return changed(old, change)


def run(old, *, forwards, backwards):
    """A profile with several passes, the last of which reduces gradients."""

    def change(one):
        if role(one) == GRADIENTS:
            return one
        # What is kept is gathered once until a backward frees it.
        is_kept = one.owner == "" and one.phase is FORWARD
        return times(one, forwards if one.phase is FORWARD and not is_kept else backwards)

    return changed(old, change)


def gathered(old, factor):
    """A profile whose layers gather other bytes."""
    return changed(
        old,
        lambda one: sized(one, factor) if one.owner != "" and role(one) == "parameters" else one,
    )


def without_backward(old):
    new = changed(old, lambda one: None if one.phase is BACKWARD else one)
    return replace(new, mesh_axes=old.mesh_axes, peaks=old.peaks)


def over(old, *axes):
    """A profile over another axis; gradients are all-reduced over a second one too."""
    moved = [replace(one, axis=axes[0] if one.axis == "dp" else one.axis) for one in old.rows]
    reduced = [one for one in moved if role(one) == GRADIENTS and one.what == "reduce_scatter"]
    again = [replace(one, what="all_reduce", axis=axis) for axis in axes[1:] for one in reduced]
    return made([*moved, *again])


def often(old, count, *, forward=1):
    """A profile whose gradients are reduced several times, and whose units are gathered so."""

    def change(one):
        is_gather = one.phase is FORWARD and role(one) == "parameters"
        return times(one, count if role(one) == GRADIENTS else forward if is_gather else 1)

    return changed(old, change)


def backwards(old, places):
    """A profile whose gradients are reduced in some backward passes."""

    def change(one):
        (calls,) = one.calls
        is_meant = role(one) == GRADIENTS
        return replace(one, calls=(replace(calls, backwards=places),)) if is_meant else one

    return changed(old, change)


def ddp(*sizes, owner=""):
    return [row(BACKWARD, owner, "all_reduce", size, GRADIENTS, axis="world") for size in sizes]


def over_data(old):
    """A profile whose axis has another name."""
    return replace(over(old, "data"), mesh_axes=(replace(DP, name="data"),))


def on_ranks(rows, *ranks):
    return [replace(one, ranks=ranks) for one in rows]


def reduced_in(old, dtype):
    def change(one):
        is_meant = one.owner == "layers.0" and role(one) == GRADIENTS
        return typed(sized(one, 3), dtype) if is_meant else one

    return changed(old, change)


LAYERS = [f"layers.{n}" for n in range(3)]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            profile(),
            without(gathered(profile(), 0.5), *LAYERS),
            "gradients of layers.{0..2} are no longer reduced over dp "
            "(was 3 calls, 30.0 KiB per rank)",
        ),
        (
            GATED,
            PARALLEL,
            "gradients of layers.{0..1}.gate are no longer reduced over tp (was 2 calls, 512 B "
            "per rank)",
        ),
        # The gate is left in the model: other modules of its layer still send.
        (
            made([*GATES, *ATTENTION]),
            made(ATTENTION),
            "gradients of layers.0.gate are no longer reduced over tp (was 1 call, 256 B per rank)",
        ),
        (
            over(profile(), "shard", "replicate"),
            over(gathered(profile(), 2), "shard"),
            "gradients of (root), layers.{0..2} are no longer reduced over replicate (was 4 calls, "
            "35.0 KiB per rank)",
        ),
        (
            over(profile(), "world"),
            over(gathered(profile(), 2), "shard"),
            "gradients of (root), layers.{0..2} are reduced over 4 ranks instead of 8: 4 calls, "
            "35.0 KiB per rank",
        ),
        (
            profile(),
            often(profile(), 4, forward=2),
            "gradients of (root), layers.{0..2} are reduced 1 -> 4 times over dp: 4 -> 16 "
            "calls, 35.0 -> 140.0 KiB per rank",
        ),
        (
            profile(),
            reduced_in(profile(), "bfloat16"),
            "gradients of layers.0 are reduced over dp in bfloat16 instead of float32: 1 call, "
            "30.0 KiB per rank",
        ),
        (
            profile(),
            made(ATTENTION),
            "parameters of (root), layers.{0..2} are no longer sharded: no unit gathers them, and "
            "their gradients are no longer reduced over dp (was 4 calls, 35.0 KiB per rank)",
        ),
        (
            backwards(profile(), "the last of 4 backwards"),
            backwards(gathered(profile(), 2), "the first of 4 backwards"),
            "gradients of (root), layers.{0..2} are now reduced in the first of 4 backwards, but "
            "not in the last: 4 calls, 35.0 KiB per rank over dp",
        ),
        # By the new names of modules, and the old ones of axes.
        (
            profile(),
            renamed(without(gathered(profile(), 0.5), *LAYERS)),
            "gradients of blocks.{0..2} are no longer reduced over dp "
            "(was 3 calls, 30.0 KiB per rank)",
        ),
        (
            profile(),
            over_data(without(gathered(profile(), 0.5), *LAYERS)),
            "gradients of layers.{0..2} are no longer reduced over dp "
            "(was 3 calls, 30.0 KiB per rank)",
        ),
        # Others reduce more, of which this one is no part; or as many in another type.
        (
            made([*unit("a"), *unit("b")]),
            made([*without(made(unit("a", 64)), "a").rows, *unit("b", 2 * NBYTES)]),
            "gradients of a are no longer reduced over dp (was 1 call, 5.0 KiB per rank)",
        ),
        (
            in_bfloat16(profile()),
            without(gathered(profile(), 2), "layers.1"),
            "gradients of layers.1 are no longer reduced over dp (was 1 call, 5.0 KiB per rank)",
        ),
        # Over one rank.
        (
            profile(),
            replace(gathered(profile(), 2), mesh_axes=(replace(DP, size=1, dims=()),)),
            "gradients of (root), layers.{0..2} are no longer reduced over dp (was 4 calls, 35.0 "
            "KiB per rank)",
        ),
        # Backward ran twice.
        (
            profile(),
            changed(
                profile(),
                lambda one: times(one, 2) if one.phase is BACKWARD and role(one) else one,
            ),
            "gradients of (root), layers.{0..2} are reduced 1 -> 2 times over dp: 4 -> 8 "
            "calls, 35.0 -> 70.0 KiB per rank",
        ),
        # A part of a unit gets none.
        (
            profile(),
            fewer(profile(), "layers.1"),
            "fewer gradients of layers.1 are reduced over dp, gathers unchanged: 1 call, 10.0 -> "
            "5.0 KiB per rank",
        ),
        # Forwards that no backward follows.
        (
            run(profile(), forwards=4, backwards=4),
            run(profile(), forwards=4, backwards=1),
            "gradients of (root), layers.{0..2} come from 1 backward instead of 4, forwards "
            "as often: 4 calls, 35.0 KiB per rank over dp",
        ),
        (
            run(profile(tensor_parallel=True), forwards=4, backwards=4),
            run(profile(tensor_parallel=True), forwards=4, backwards=2),
            "gradients of (root), layers.{0..2} come from 2 backwards instead of 4, forwards "
            "as often: 4 calls, 35.0 KiB per rank over dp",
        ),
        # The worst first.
        (
            profile(),
            without(often(profile(), 4, forward=2), "layers.2"),
            "gradients of layers.2 are no longer reduced over dp (was 1 call, 10.0 KiB per rank)",
        ),
        (
            profile(),
            over(profile(), "dp", "dp"),
            "gradients of (root), layers.{0..2} now also reduced by all_reduce[dp], gathers "
            "unchanged",
        ),
        # Each rank reduces those of its own stage.
        (
            made([*on_ranks(unit("layers.0"), 0, 1), *on_ranks(unit("layers.1"), 2, 3)]),
            made(
                [
                    *on_ranks(without(made(unit("layers.0", 64)), "layers.0").rows, 0, 1),
                    *on_ranks(without(made(unit("layers.1", 64)), "layers.1").rows, 2, 3),
                ]
            ),
            "gradients of layers.{0..1} are no longer reduced over dp "
            "(was 1 call, 5.0 KiB per rank)",
        ),
    ],
)
def test_what_breaks_training_is_told_first(old, new, line):
    comparison = compare(old, new)
    text = render_comparison(comparison, snapshot="s")
    # The sum of the gradients is the same, so these changes have no mark.
    is_harmless = " times over " in line or " instead of float32" in line
    mark = "" if is_harmless else "breaks training: "
    assert text.changes[0].text == line
    assert text.lines[1] == f"  {mark}{line}"
    assert write_headline(text).startswith(f"{mark}{line}")
    # Once alone.
    assert sum(line.partition(" over ")[0] in other for other in text.body) == 1


def training(old, new, evidence=None):
    comparison = compare(old, new, evidence)
    return [*comparison.sentences[: len(comparison.training)]]


HEAD = unit("head", 1_024)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (profile(), renamed(gathered(profile(), 2))),
        (profile(), more_layers(gathered(profile(), 2))),
        (profile(5), gathered(profile(), 2)),
        # Merged into the root, split off from it, and in another group.
        (made([*unit(""), *HEAD]), made(unit("", NBYTES + 1_024))),
        (made([*unit("", NBYTES + 1_024)]), made([*unit(""), *HEAD])),
        (made([*unit("head"), *unit("norm")]), made(unit("head+norm", 2 * NBYTES))),
        # DDP: other buckets, modules that reduce by hand, and FSDP in its place.
        (made(ddp(4_096, 2_048)), made(ddp(1_024, 3_072, 2_048))),
        (made(ddp(4_096)), made([*ddp(2_048, owner="up"), *ddp(2_048, owner="down")])),
        (made(ddp(4_096)), over(made(unit("layers.0", 4_096)), "world")),
        (over(made(unit("layers.0", 4_096)), "world"), made(ddp(4_096))),
        # Over an axis of another name, by another kind, over two axes, and over more ranks.
        (profile(), over_data(profile())),
        (
            profile(),
            changed(
                profile(),
                lambda one: replace(one, what="all_reduce") if role(one) == GRADIENTS else one,
            ),
        ),
        (over(profile(), "world"), over(gathered(profile(), 2), "shard", "replicate")),
        (over(profile(), "shard"), over(gathered(profile(), 2), "world")),
        # Ranks share the work of a batch in place of batches of their own.
        (over(profile(), "world"), made([*profile().rows, *split("layers.0.mlp")])),
        # Work that is split no more, with what it left partial.
        (GATED, profile()),
        (GATED, made([*profile().rows, *split("layers.0.attention")])),
        # What other modules inside of it reduce.
        (
            made(unit("a")),
            made([*without(made(unit("a", 64)), "a").rows, *ddp(NBYTES, owner="a.up")]),
        ),
        (profile(), backwards(gathered(profile(), 2), "the last of 4 backwards")),
        # As many times as forwards.
        (profile(), twice(gathered(profile(), 2))),
        (profile(), accumulated(gathered(profile(), 2))),
        (profile(), changed(profile(), lambda one: times(one, 2 + 2 * (role(one) != GRADIENTS)))),
        (
            made([*unit("a", kept=True), *ATTENTION]),
            made(
                [*often(made(unit("a", kept=True)), 4).rows, *(times(one, 4) for one in ATTENTION)]
            ),
        ),
        (
            made([*ddp(64, 128), *ATTENTION]),
            made([*(times(one, 2) for one in ddp(96)), *ATTENTION]),
        ),
        # A layer that another stage runs.
        (
            made([*on_ranks(unit("layers.0"), 0), *on_ranks(unit("layers.1"), 0)]),
            made([*on_ranks(unit("layers.0"), 0), *on_ranks(unit("layers.1"), 1)]),
        ),
        # A part of the unit is gone, or reduced by a module inside.
        (profile(), fewer(gathered(profile(), 0.5), *LAYERS)),
        (
            made(unit("a")),
            made([*fewer(made(unit("a")), "a").rows, *ddp(NBYTES, owner="a.up")]),
        ),
        (made(ddp(4_096)), made(ddp(2_048))),
        # Fewer micro-batches, units that stay gathered, and less that tensor parallelism sends.
        (
            run(profile(), forwards=4, backwards=4),
            run(profile(), forwards=1, backwards=1),
        ),
        (
            run(profile(), forwards=4, backwards=4),
            changed(
                run(profile(), forwards=4, backwards=4),
                lambda one: (
                    times(one, Fraction(1, 4))
                    if (one.phase, one.what) == (BACKWARD, "reshard")
                    else one
                ),
            ),
        ),
        (
            changed(
                profile(tensor_parallel=True),
                lambda one: (
                    times(one, 2)
                    if one.what == "reduce_scatter" and role(one) != GRADIENTS
                    else one
                ),
            ),
            profile(tensor_parallel=True),
        ),
        # A backward that reduces nothing, and gradients that are reduced after it.
        (made([*split("a"), *split("b")]), without_backward(made([*split("a"), *split("b")]))),
        (
            made(ddp(4_096)),
            made([replace(one, phase=Phase.OUTSIDE) for one in ddp(4_096)]),
        ),
        # A layer whose last module is gone.
        (made([*GATES, *ATTENTION]), made([*GATES[:1], *ATTENTION])),
        (profile(), over(profile(), "dp", "replicate")),
        # Another number of ranks.
        (over(profile(), "world"), replace(over(profile(), "shard"), world_size=4)),
    ],
)
def test_what_looks_like_it_is_not_told(old, new):
    assert compare(old, new).changes
    assert training(old, new) == []


EDP, EP = MeshAxis(name="edp", size=2, dims=((2, 2),)), MeshAxis(name="ep", size=2, dims=((2, 1),))
ALL = MeshAxis(name="world", size=4, dims=((4, 1),))


def moe(axis, *others, layout=(EDP, EP, ALL), dense="world"):
    """A profile whose experts, and whose other modules, reduce gradients over an axis each."""
    experts = row(BACKWARD, "layers.0.experts", "all_reduce", 64, GRADIENTS, axis=axis)
    routed = row(FORWARD, "layers.0.moe", "all_to_all", 32, "activations", axis="ep")
    sent = [experts, routed, *others, *(replace(one, axis=dense) for one in ddp(128))]
    return replace(made(sent), mesh_axes=layout, world_size=4)


OTHER_MESH = replace(EDP, dims=((2, 4),)), EP, ALL
GATHERED = row(FORWARD, "a", "all_gather", 64, "activations", axis="edp")


def test_experts_are_reduced_over_ranks_with_other_experts():
    assert training(moe("edp"), moe("ep")) == [
        "gradients of layers.0.experts are reduced over ep instead of edp: 1 call, 64 B per rank"
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (moe("edp"), moe("world")),
        (moe("edp", dense="edp"), moe("ep", dense="ep")),
        (moe("edp"), moe("ep", layout=OTHER_MESH)),
        (moe("edp"), moe("data", layout=(replace(EDP, name="data"), EP, ALL))),
        (moe("edp", GATHERED), moe("ep")),
    ],
    ids=["more ranks", "all modules", "other mesh", "other name", "other forward"],
)
def test_other_axes_that_do_not_break_training(old, new):
    assert compare(old, new).changes
    assert training(old, new) == []


def kept_by_all(old):
    """A profile whose units stay gathered, so that forward sends nothing."""
    rows = [one for one in old.rows if one.phase is BACKWARD and one.what != "all_gather"]
    return replace(made(rows), mesh_axes=old.mesh_axes, peaks=(GatheredPeak(nbytes=NBYTES),))


@pytest.mark.parametrize("old", [profile(), kept_by_all(profile())])
def test_step_without_backward_loses_all_gradients(old):
    """A loss that is detached, or computed without a graph."""
    text = render_comparison(compare(old, without_backward(old)), snapshot="s")
    assert [one.text for one in text.select("breaks training")] == [
        "no more collectives in backward, forward unchanged",
        "gradients of (root), layers.{0..2} are no longer reduced over dp (was 4 calls, 35.0 KiB "
        "per rank)",
    ]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (fewer, {"partly_frozen": frozenset(LAYERS)}),
        (lambda old, *_: without_backward(old), {}),
    ],
)
def test_what_is_frozen_in_the_tree_is_not_lost(change, facts):
    old = profile()
    evidence = Evidence(units=frozenset(LAYERS), policies={}, **facts)
    new = change(old, *LAYERS)
    assert compare(old, new, evidence).changes
    assert training(old, new, evidence) == []
    assert training(old, new)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_gradients_of_frozen_parameters_are_not_lost(is_frozen):
    old = profile()
    trainable = frozenset() if is_frozen else frozenset(LAYERS)
    evidence = Evidence(units=frozenset(LAYERS), policies={}, trainable=trainable)
    for new in (frozen(old), frozen(gathered(old, 2))):
        assert bool(training(old, new, evidence)) != is_frozen


def detached(*, kept, peak):
    """Two profiles, and units of which the second has no rows, although the tree has them."""
    units = [row for owner in LAYERS for row in unit(owner, kept=kept)]
    old = replace(made([*units, *HEAD]), peaks=(GatheredPeak(nbytes=NBYTES),))
    new = replace(made(HEAD), peaks=(GatheredPeak(nbytes=peak),))
    names = frozenset({*LAYERS, "head"})
    return old, new, Evidence(units=names, policies={}, trainable=names)


def test_units_that_stay_gathered_lose_their_gradients():
    """Their inputs were detached: no backward reshards them, so forward need not gather them."""
    assert training(*detached(kept=True, peak=NBYTES)) == [
        "layers.{0..2} no longer gathered or reduced, gathers of other units unchanged"
    ]


@pytest.mark.parametrize("facts", [{"kept": True, "peak": 1_024}, {"kept": False, "peak": NBYTES}])
def test_units_that_were_not_called_lose_nothing(facts):
    assert training(*detached(**facts)) == []


LAST, FIRST, EARLY = (
    "the last of 4 backwards",
    "the first of 4 backwards",
    "2 of 4 backwards but not the last",
)


def reduced(**fields):
    """A profile whose gradients are reduced in another way."""

    def change(one):
        calls = tuple(replace(call, **fields) for call in one.calls)
        return replace(one, calls=calls) if role(one) == GRADIENTS else one

    return changed(profile(), change)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (LAST, FIRST, "in the first of 4 backwards, but not in the last"),
        ("", EARLY, "in 2 of 4 backwards, but not in the last"),
        (
            FIRST,
            EARLY,
            "in 2 of 4 backwards, but not in the last (was in the first of 4 backwards)",
        ),
        (EARLY, "", "in the last backward (was in 2 of 4 backwards)"),
        # As many micro-batches as there are follow from what else is sent.
        (LAST, "the last of 8 backwards", ""),
        (LAST, "2 of 4 backwards", ""),
        (LAST, "", ""),
    ],
)
def test_backward_that_reduces_no_more_is_named(before, after, text):
    old, new = reduced(backwards=before), reduced(backwards=after)
    line = f"gradients of (root), layers.{{0..2}} are now reduced {text}"
    line += ": 4 calls, 35.0 KiB per rank over dp"
    assert training(old, new) == ([line] if text else [])
    assert bool(compare(old, new).changes) is bool(text)
    # Whatever else changed.
    assert training(old, replace(new, world_size=4)) == ([line] if text else [])


def test_way_to_combine_gradients_is_told():
    line = "gradients of (root), layers.{0..2} are reduced by avg instead of sum over dp: "
    sentences = compare(reduced(), reduced(reduce_op="avg")).sentences
    assert sentences == (f"{line}4 calls, 35.0 KiB per rank",)
    # The code may divide the sum itself.
    assert training(reduced(), reduced(reduce_op="avg")) == []


def test_ranks_may_differ_in_number_of_backwards():
    def of_ranks(*words):
        rows = [on_ranks(reduced(backwards=word).rows, rank) for rank, word in enumerate(words)]
        return made([row for held in rows for row in held])

    old = of_ranks(LAST, "the last of 3 backwards")
    assert compare(old, made(on_ranks(reduced().rows, 0, 1))).changes == ()
    assert training(old, of_ranks(LAST, FIRST))


def test_dtypes_changed_by_torch_are_reported_last():
    old = in_bfloat16(profile())
    new = changed(
        old, lambda one: typed(sized(one, 2), "float32") if role(one) == GRADIENTS else one
    )
    versions = [replace(one, torch_version=f"2.{minor}.0") for one, minor in ((old, 13), (new, 15))]
    line = "gradients[dp] bfloat16 -> float32, twice the bytes"
    assert training(*versions) == training(old, new) == []
    assert compare(*versions).sentences == compare(old, new).sentences == (line,)


def test_a_lost_reduction_is_told_once():
    move = "(Partial(sum))->(Replicate())"
    moves = [counted("redistribution", BACKWARD, one.owner, move) for one in GATES]
    comparison = compare(made([*GATED.rows, *moves]), PARALLEL)
    assert [*map(type, comparison.explanation.steps)] == [Redistributed]
    text = render_comparison(comparison, snapshot="s")
    assert {row.severity for row in text.rows} == {"breaks training", "cost"}
    assert len(text.changes) == 1
    assert len(training(profile(), made(ATTENTION))) == 1


def test_fewer_gradients_come_before_larger_gathers():
    """LoRA in place of training everything, which gathers its adapters too."""

    def change(one):
        return sized(one, {GRADIENTS: 0.25, "parameters": 1.05}.get(role(one), 1))

    old = made([*unit("a", 2_000), *unit("b", 4_000)])
    new = made([*(change(one) for one in unit("a", 2_000)), *unit("b", 4_000)])
    new = made([*new.rows, *unit("c")])
    rows = render_comparison(compare(old, new), snapshot="s").rows
    first = next(row.text for row in rows if row.text.startswith("a "))
    assert first.startswith("a in backward: reduce_scatter[dp] x1, 2.0 KiB -> 500 B")


def test_lost_gradients_do_not_cover_an_added_unit():
    (lost,) = compare(profile(), without(gathered(profile(), 0.5), *LAYERS)).training
    (added,) = compare(profile(), made([*profile().rows, *unit("aux")])).reported
    assert not lost.covers_step(added)


@pytest.mark.parametrize(("factor", "is_fewer"), [(0.25, True), (0.5, False), (0.75, False)])
def test_parts_of_a_unit_reduced_by_two_backwards_may_be_all(factor, is_fewer):
    """As if each of two losses had a head of its own in the root."""

    def change(one):
        if one.phase is not BACKWARD or not role(one):
            return one
        one = times(one, 2)
        return sized(one, factor) if role(one) == "gradients" and one.owner == "" else one

    sentences = compare(profile(), changed(profile(), change)).sentences
    assert any("fewer gradients of (root)" in line for line in sentences) is is_fewer
    assert any("are reduced 1 -> 2 times over" in line for line in sentences)
