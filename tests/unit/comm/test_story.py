"""Stories of made-up profiles: planted changes are found, and nothing else is said."""

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import pytest

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import (
    Calls,
    CommProfile,
    CommRow,
    RedistributionRow,
    ReshardRow,
    sort_rows,
)
from pytest_fsdp_comm.comm.story import steps
from pytest_fsdp_comm.comm.story.facts import Pool
from pytest_fsdp_comm.comm.story.search import explain
from pytest_fsdp_comm.reports.comm_changes import render_comparison
from pytest_fsdp_comm.reports.story_lines import step_line

FORWARD, BACKWARD, RECOMPUTE = Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE
DP = MeshAxis(name="dp", size=4, dims=((4, 2),))
TP = MeshAxis(name="tp", size=2, dims=((2, 1),))
NBYTES = 5_120
WHOLE = "(Shard(dim=1))->(Replicate())"


def row(phase, owner, kind, nbytes, role="", *, axis="dp", dtype="float32", count=1, ahead=0):
    calls = Calls(nbytes=nbytes, dtype=dtype, role=role, count=count, ahead=ahead)
    return CommRow(phase=phase, owner=owner, kind=kind, axis=axis, calls=(calls,))


def unit(owner, nbytes=NBYTES, *, kept=False):
    """The rows of an FSDP unit in a step."""
    rows = [row(FORWARD, owner, "all_gather", nbytes, "parameters")]
    if not kept:
        rows.append(row(BACKWARD, owner, "all_gather", nbytes, "parameters", ahead=1))
    rows.append(row(BACKWARD, owner, "reduce_scatter", nbytes, "gradients"))
    acts = [(FORWARD, "unshard"), (BACKWARD, "reshard")]
    acts += [] if kept else [(FORWARD, "reshard"), (BACKWARD, "unshard")]
    return rows, [ReshardRow(phase=at, module=owner, action=act, count=1) for at, act in acts]


def split(owner, nbytes=1_024):
    """The rows of a module under tensor parallelism."""
    rows = [
        row(FORWARD, owner, "all_gather", nbytes, "activations", axis="tp"),
        row(BACKWARD, owner, "reduce_scatter", nbytes, "activations", axis="tp"),
    ]
    return rows, [RedistributionRow(phase=FORWARD, owner=owner, change=WHOLE, count=1)]


def profile(layers=3, *, tensor_parallel=False, name="layers", extra=()):
    rows, reshards = unit("", kept=True)
    moves = []
    for number in range(layers):
        more, acts = unit(f"{name}.{number}", 2 * NBYTES)
        rows += more
        reshards += acts
        if tensor_parallel:
            more, changes = split(f"{name}.{number}.mlp")
            rows += more
            moves += changes
    for more, acts in extra:
        rows += more
        reshards += acts
    return made(rows, reshards, moves)


def made(rows, reshards=(), moves=()):
    used = {one.axis for one in rows}
    return CommProfile(
        world_size=8,
        mesh_axes=tuple(axis for axis in (DP, TP) if axis.name in used),
        rows=sort_rows(rows),
        reshards=sort_rows(reshards),
        redistributions=sort_rows(moves),
    )


def changed(old, change_row=lambda one: one, change_reshard=lambda one: one, move=lambda one: one):
    """A profile with each row changed, or left out where the change gives None."""

    def all_of(rows, change):
        return [new for new in map(change, rows) if new is not None]

    return made(
        all_of(old.rows, change_row),
        all_of(old.reshards, change_reshard),
        all_of(old.redistributions, move),
    )


def times(one, factor):
    """A row that happens several times as often."""
    if isinstance(one, CommRow):
        return replace(
            one, calls=tuple(replace(calls, count=calls.count * factor) for calls in one.calls)
        )
    return replace(one, count=one.count * factor)


def sized(one, factor):
    return replace(
        one, calls=tuple(replace(calls, nbytes=int(calls.nbytes * factor)) for calls in one.calls)
    )


def role(one):
    return one.calls[0].role


# Each turns a profile into another one; beside it, what may be told of it.


def more_layers(old):
    names = [one.owner for one in old.rows if one.owner and one.owner.startswith("layers.")]
    count = 1 + max(int(name.split(".")[1]) for name in names)

    def grown(rows):
        last = [one for one in rows if (owner(one) or "").startswith(f"layers.{count - 1}")]
        new = [with_owner(one, owner(one).replace(f".{count - 1}", f".{count}")) for one in last]
        return [*rows, *new]

    return made(grown(old.rows), grown(old.reshards), grown(old.redistributions))


def owner(one):
    return one.module if isinstance(one, ReshardRow) else one.owner


def with_owner(one, name):
    return replace(one, module=name) if isinstance(one, ReshardRow) else replace(one, owner=name)


def renamed(old):
    def change(one):
        return with_owner(one, (owner(one) or "").replace("layers.", "blocks."))

    return changed(old, change, change, change)


def twice(old):
    return changed(old, *[lambda one: times(one, 2)] * 3)


def accumulated(old):
    def change(one):
        return one if isinstance(one, CommRow) and role(one) == "gradients" else times(one, 4)

    return changed(old, change, change, change)


def larger_batch(old):
    return changed(old, lambda one: sized(one, 3) if role(one) == "activations" else one)


def in_bfloat16(old):
    def change(one):
        calls = (replace(calls, dtype="bfloat16") for calls in sized(one, Fraction(1, 2)).calls)
        return replace(one, calls=tuple(calls))

    return changed(old, change)


def kept(old):
    def change(one):
        is_gather = one.kind == "all_gather" and role(one) == "parameters"
        return None if is_gather and one.phase is BACKWARD else one

    def act(one):
        gone = {(FORWARD, "reshard"), (BACKWARD, "unshard")}
        return None if (one.phase, one.action) in gone else one

    return changed(old, change, act)


def reduced_often(old):
    return changed(old, lambda one: times(one, 4) if role(one) == "gradients" else one)


def frozen(old):
    gone = {owner(one) for one in old.rows if (one.owner or "").endswith(".1")}
    return changed(old, lambda one: None if one.owner in gone and role(one) == "gradients" else one)


def recomputed(old):
    again = [
        replace(one, phase=RECOMPUTE)
        for one in old.rows
        if one.phase is FORWARD and role(one) == "activations"
    ]
    return made([*old.rows, *again], old.reshards, old.redistributions)


def evaluated(old):
    def change(one):
        is_kept = (owner(one) or "") == "" and (isinstance(one, ReshardRow) or role(one))
        return times(one, 2) if one.phase is FORWARD and not is_kept else one

    return changed(old, change, change, change)


PLANTED = {
    more_layers: {steps.Layers},
    renamed: {steps.Renamed},
    twice: {steps.Counts},
    accumulated: {steps.Counts},
    larger_batch: {steps.ActivationSizes},
    in_bfloat16: {steps.Dtype},
    kept: {steps.Kept},
    reduced_often: {steps.ReducedTimes},
    frozen: {steps.ReductionGone},
    recomputed: {steps.RecomputeCame},
    evaluated: {steps.Counts},
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (more_layers, "layers: 3 -> 4 modules, each as its siblings"),
        (renamed, "layers is blocks now"),
        (twice, "every count x2"),
        (accumulated, "forwards and backwards x4, reductions of gradients x1"),
        (larger_batch, "activations: x3 bytes in each call, as many calls"),
        (
            in_bfloat16,
            "parameters[dp], gradients[dp], activations[tp] float32 -> bfloat16, x1/2 bytes",
        ),
        (
            kept,
            "layers.{0..2} kept gathered after forward, not gathered in backward: 3 calls, 30.0 "
            "KiB in all less",
        ),
        (
            reduced_often,
            "gradients of (root), layers.{0..2} reduced 1 -> 4 times (reduce_scatter), gathers as "
            "before",
        ),
        (
            frozen,
            "gradients of layers.1 no longer reduced (reduce_scatter[dp]), gathers as before",
        ),
        (
            recomputed,
            "forward collectives of layers.{0..2}.mlp repeated by recomputation in backward: "
            "3 calls, 3.0 KiB in all",
        ),
        (evaluated, "forward x2, backward x1"),
    ],
)
def test_a_change_of_the_whole_is_one_line(change, line):
    old = profile(tensor_parallel=True)
    story = explain(old, change(old))
    assert story.is_exact
    assert [step_line(step) for step in story.steps] == [line]
    assert PLANTED[change] == {type(step) for step in story.steps}


def reached(old, story, new):
    """Whether the steps turn the old profile into the new one, asked of the steps alone."""
    pool = Pool()
    state, target = pool.state(old), pool.state(new)
    for step in story.steps:
        state = step.apply(state, pool)
    return state.keys() == target.keys() and all(state[name] is target[name] for name in state)


# The second looks for layers by their old name, or gathers again what is kept.
UNPLANTED = {(renamed, more_layers), (kept, evaluated)}
PAIRS = list(itertools.permutations(PLANTED, 2))


@pytest.mark.parametrize("seed", range(4))
def test_pairs_of_changes_are_told_exactly_and_nothing_else_is(seed):
    chance = random.Random(seed)  # noqa: S311  # profiles are no secrets
    exact = 0
    for first, second in PAIRS:
        extra = [unit(name, 512 * chance.randint(1, 9)) for name in ("head", "norm")]
        old = profile(
            chance.randint(2, 5),
            tensor_parallel=chance.random() < 0.7,
            extra=extra[: chance.randint(0, 2)],
        )
        middle = first(old)
        if (first, second) in UNPLANTED:
            continue
        new = second(middle)
        story = explain(old, new)
        names = (first.__name__, second.__name__)
        assert story.is_exact == reached(old, story, new), names
        exact += story.is_exact
        # What is told is what was planted; frozen layers are those whose gradients are gone.
        told = {type(step) for step in story.steps}
        assert told <= PLANTED[first] | PLANTED[second], (names, told)
    assert exact >= 0.9 * len(PAIRS), exact


def test_rows_that_no_step_explains_are_left_and_nothing_is_guessed():
    old = profile()
    chance = random.Random(0)  # noqa: S311  # profiles are no secrets
    new = changed(
        old, lambda one: times(sized(one, chance.choice([2, 3, 7])), chance.randint(1, 3))
    )
    story = explain(old, new)
    assert not story.is_exact
    assert story.before.collectives
    assert compare(old, new).left


@pytest.mark.parametrize(
    ("new", "never"),
    [
        # A unit of its own that is gathered as often as its siblings is not called per chunk.
        (profile(extra=[unit("head", 512)]), "called several times"),
        # Two layers more are not two layers called more often.
        (profile(5), "called several times"),
        # Every count twice is no reduction for each micro-batch.
        (twice(profile()), "reduced in each micro-batch"),
        # Gradients that are gone with their gathers are not frozen.
        (profile(2), "frozen"),
        # More bytes of the same type are not another type.
        (changed(profile(), lambda one: sized(one, 2)), "MixedPrecisionPolicy"),
    ],
)
def test_an_innocent_neighbour_of_a_cause_is_not_called_so(new, never):
    text = render_comparison(compare(profile(), new), snapshot="s", accept="")
    assert len(text.full) > 1
    assert never not in "\n".join(text.full)


def test_a_head_that_is_split_off_and_called_for_each_chunk_is_told_as_both():
    rows, acts = unit("head", 1_024)
    rows = [times(one, 4) if one.kind == "all_gather" else one for one in rows]
    rest, kept_acts = unit("", NBYTES - 1_024, kept=True)
    layers, layer_acts = unit("layers.0", NBYTES)
    whole, whole_acts = unit("", NBYTES, kept=True)
    old = made([*whole, *layers], [*whole_acts, *layer_acts])
    new = made([*rest, *layers, *rows], [*kept_acts, *layer_acts, *acts])
    comparison = compare(old, new)
    (step,) = comparison.story.steps
    assert step_line(step) == (
        "head split off (root), a unit of its own now, gathered 4 times in forward: 8 calls, 8.0 "
        "KiB in all"
    )
    assert [cause.text[:30] for cause in comparison.causes] == ["called several times in one fo"]


def test_a_removed_and_an_added_module_of_equal_rows_is_told_as_either():
    old, new = (profile(extra=[unit(name, 512)]) for name in ("adapter", "head"))
    assert [step_line(step) for step in explain(old, new).steps] == [
        "adapter is head now, or another module with equal rows in its place"
    ]


def test_a_unit_that_came_has_bytes_that_no_other_unit_lost():
    old, new = profile(), profile(extra=[unit("head", 512)])
    assert [step_line(step) for step in explain(old, new).steps] == [
        "head gathered now, with bytes that no unit had: 2 calls, 1.0 KiB in all"
    ]
    # The same beside a unit that shrank by other bytes: two changes, neither of which is told so.
    shrunk = changed(new, lambda one: sized(one, Fraction(1, 2)) if one.owner == "" else one)
    assert not any(isinstance(step, steps.UnitCame) for step in explain(old, shrunk).steps)


def test_a_count_that_does_not_divide_refutes_a_fraction():
    old = changed(twice(profile()), lambda one: times(one, 3) if one.owner == "layers.1" else one)
    new = changed(old, lambda one: times(one, 1) if one.owner == "layers.1" else one)
    assert explain(old, new).steps == ()
    third = profile(extra=[unit("head", 512)])
    assert not any(
        isinstance(step, steps.Counts) and step.factor < 1 for step in explain(third, new).steps
    )


def test_the_layers_of_a_large_model_are_one_line():
    old, new = profile(126, tensor_parallel=True), profile(128, tensor_parallel=True)
    text = render_comparison(compare(old, new), snapshot="s", accept="")
    assert text.full == (
        "comm_mode differs from s",
        "  layers: 126 -> 128 modules, each as its siblings",
    )
