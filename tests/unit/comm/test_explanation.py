"""Stories of made-up profiles: planted changes are found, and nothing else is said."""

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from sample_profiles import (
    BACKWARD,
    FORWARD,
    NBYTES,
    RECOMPUTE,
    accumulated,
    changed,
    counted,
    describe_steps,
    evaluated,
    frozen,
    in_bfloat16,
    kept,
    larger_batch,
    made,
    more_layers,
    profile,
    recomputed,
    reduced_often,
    renamed,
    role,
    row,
    sized,
    split,
    times,
    twice,
    unit,
)

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.amounts import Counts, Dtype, Sizes
from pytest_fsdp_comm.comm.explanation.gradients import Reduced, ReducedTimes
from pytest_fsdp_comm.comm.explanation.names import Layers, Renamed
from pytest_fsdp_comm.comm.explanation.passes import Recomputed
from pytest_fsdp_comm.comm.explanation.resharding import Freed
from pytest_fsdp_comm.comm.explanation.search import explain
from pytest_fsdp_comm.comm.explanation.states import Between, Pool, State
from pytest_fsdp_comm.comm.explanation.units import Gathered
from pytest_fsdp_comm.comm.explanation.words import name_modules
from pytest_fsdp_comm.reports.changes import render_comparison

# What may be told of each planted change.
PLANTED = {
    more_layers: {Layers},
    renamed: {Renamed},
    twice: {Counts},
    accumulated: {Counts},
    larger_batch: {Sizes},
    in_bfloat16: {Dtype},
    kept: {Freed},
    reduced_often: {ReducedTimes},
    frozen: {Reduced},
    recomputed: {Recomputed},
    evaluated: {Counts},
}


def reached(old, explanation, new):
    """Whether the steps turn the old profile into the new one, asked of the steps alone."""
    pool = Pool()
    state, target = pool.state(old), pool.state(new)
    for step in explanation.steps:
        state = step.apply(state, pool)
    return state == target


# The second looks for layers by their old name, or gathers again what is kept.
UNPLANTED = {(renamed, more_layers), (kept, evaluated)}
PAIRS = list(itertools.permutations(PLANTED, 2))


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.release) for seed in (2, 3))]
)
def test_two_changes_are_explained_exactly(seed):
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
        explanation = explain(old, new)
        names = (first.__name__, second.__name__)
        assert explanation.is_exact == reached(old, explanation, new), names
        exact += explanation.is_exact
        # What is told is what was planted; frozen layers are those whose gradients are gone.
        told = {type(step) for step in explanation.steps}
        assert told <= PLANTED[first] | PLANTED[second], (names, told)
    assert exact >= 0.9 * len(PAIRS), exact


def test_unexplained_rows_are_left_over():
    old = profile()
    chance = random.Random(0)  # noqa: S311  # profiles are no secrets
    new = changed(
        old, lambda one: times(sized(one, chance.choice([2, 3, 7])), chance.randint(1, 3))
    )
    explanation = explain(old, new)
    assert not explanation.is_exact
    assert explanation.before
    assert compare(old, new).remaining


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
def test_similar_change_has_no_cause_of_another(new, never):
    text = render_comparison(compare(profile(), new), snapshot="s")
    assert len(text.lines) > 1
    assert never not in "\n".join(text.lines)


def test_split_head_called_per_chunk_names_both():
    rows = unit("head", 1_024)
    rows = [one if one.what == "reduce_scatter" else times(one, 4) for one in rows]
    layers = unit("layers.0", NBYTES)
    old = made([*unit("", NBYTES, kept=True), *layers])
    new = made([*unit("", NBYTES - 1_024, kept=True), *layers, *rows])
    comparison = compare(old, new)
    assert comparison.sentences == (
        "head split off from unit (root), gathered 4 times in forward: 8 calls, 8.0 KiB in total",
    )
    assert [cause.text[:30] for cause in comparison.causes] == ["called several times in one fo"]


@pytest.mark.parametrize("layers", [2, 0])
def test_split_unit_under_accumulation_is_not_called(layers):
    """The root is kept from one micro-batch to the next, so that it alone is gathered once."""
    units = [one for n in range(layers) for one in unit(f"layers.{n}", NBYTES)]

    def four_micro_batches(rows):
        is_kept = [one.owner == "" and one.what == "all_gather" for one in rows]
        return [one if kept else times(one, 4) for one, kept in zip(rows, is_kept, strict=True)]

    old = made(four_micro_batches([*unit("", NBYTES, kept=True), *units]))
    rest = unit("", NBYTES - 1_024, kept=True)
    new = made(four_micro_batches([*rest, *units, *unit("embed", 1_024)]))
    comparison = compare(old, new)
    (line,) = comparison.sentences
    assert line.startswith("embed split off from unit (root): ")
    assert comparison.causes == ()


def test_unit_with_the_name_of_the_root_is_not_moved():
    """From all of a model to adapters, as of TRL: its names have a prefix, its root is a unit."""

    def units(prefix, nbytes):
        layers = [one for n in range(2) for one in unit(f"{prefix}layers.{n}", nbytes)]
        return [*unit(f"{prefix}embed", 512), *layers]

    old = made([*unit("head+model.norm", 516), *units("model.", NBYTES)])
    adapted = [one for one in units("base.model.", NBYTES + 64) if role(one) != "gradients"]
    new = made([*unit("", 4, kept=True), *adapted])
    assert not any("moved to the top level" in line for line in describe_steps(old, new))


def test_added_unit_needs_bytes_no_unit_lost():
    old, new = profile(), profile(extra=[unit("head", 512)])
    assert describe_steps(old, new) == [
        "head now gathered and reduced, gathers of other units unchanged: 3 calls, 1.5 KiB in total"
    ]
    # The same beside a unit that shrank by other bytes: two changes, neither of which is told so.
    shrunk = changed(new, lambda one: sized(one, Fraction(1, 2)) if one.owner == "" else one)
    assert not any(isinstance(step, Gathered) for step in explain(old, shrunk).steps)


@pytest.mark.parametrize(
    ("ranks", "calls"),
    [
        # All alike; the sender of a scatter; two stages of a pipeline, by their size.
        ({(): 16}, "1 call of 16 B"),
        ({(0,): 32, (1, 2): 16}, "1 call of 32 B on rank 0, 1 call of 16 B on each of ranks 1-2"),
        ({(0, 1): 16, (2, 3): 16}, "1 call of 16 B on each of ranks 0-3"),
        ({(rank,): 16 * (1 + rank) for rank in range(4)}, "1 call on each of ranks 0-3"),
        (
            {(): 8, (1,): 16},
            "2 calls, 24 B in total on rank 1, 1 call of 8 B on each rank except 1",
        ),
    ],
)
def test_calls_are_counted_for_each_rank(ranks, calls):
    """The modules of a rank have its rows; over this axis nothing was sent before."""
    rows = [
        replace(row(BACKWARD, f"stage{place}", "all_reduce", nbytes, axis="tp"), ranks=of)
        for place, (of, nbytes) in enumerate(ranks.items())
    ]
    (line,) = describe_steps(profile(), profile(extra=[rows]))
    assert line.endswith(f": new collectives over tp, which had none before: {calls}")
    assert line.startswith("stage0")


def recomputed_unit(phase):
    """A unit inside of a checkpointed layer, gathered in a phase for its backward."""
    rows = [one for one in unit("a") if (one.phase, one.what) not in IN_BACKWARD]
    return [
        *rows,
        row(phase, "a", "all_gather", NBYTES, "parameters"),
        counted("reshard", phase, "a", "unshard"),
    ]


IN_BACKWARD = {(BACKWARD, "all_gather"), (BACKWARD, "unshard")}
LOSS = row(Phase.OUTSIDE, None, "all_reduce", 64, axis="tp")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            [*unit("a"), *split("b")],
            split("b"),
            "a no longer gathered or reduced",
        ),
        (
            [*unit("a"), *unit("b")],
            [
                *[times(one, 2) if one.what == "all_gather" else one for one in unit("a")],
                *unit("b"),
            ],
            "a gathered 1 -> 2 times in forward, other units once",
        ),
        (
            [
                *[times(one, 2) if one.what == "all_gather" else one for one in unit("a")],
                *unit("b"),
            ],
            [*unit("a"), *unit("b")],
            "a gathered 2 -> 1 times in forward, now as often as the others",
        ),
        (
            recomputed_unit(RECOMPUTE),
            recomputed_unit(BACKWARD),
            "a gathered in backward instead of recomputation",
        ),
        (
            recomputed_unit(BACKWARD),
            recomputed_unit(RECOMPUTE),
            "a gathered in recomputation instead of backward",
        ),
        # Tokens that experts exchange again are not hidden behind the gather.
        (
            [*recomputed_unit(BACKWARD), row(FORWARD, "a", "all_to_all", 64)],
            [
                *recomputed_unit(RECOMPUTE),
                row(FORWARD, "a", "all_to_all", 64),
                row(RECOMPUTE, "a", "all_to_all", 64),
            ],
            "recomputation now repeats the forward collectives of a: 1 call of 64 B",
        ),
        # Neither are activations that tensor parallelism gathers again.
        (
            [
                *recomputed_unit(BACKWARD),
                replace(row(FORWARD, "a", "all_gather", 64, "activations"), axis="tp"),
            ],
            [
                *recomputed_unit(RECOMPUTE),
                replace(row(FORWARD, "a", "all_gather", 64, "activations"), axis="tp"),
                replace(row(RECOMPUTE, "a", "all_gather", 64, "activations"), axis="tp"),
            ],
            "recomputation now repeats the forward collectives of a: 1 call of 64 B",
        ),
        # Gathered in both is repeated.
        (
            unit("a"),
            [*unit("a"), row(RECOMPUTE, "a", "all_gather", NBYTES, "parameters")],
            "recomputation now repeats the forward collectives of a: 1 call of 5.0 KiB",
        ),
        # A parallel loss grows with the activations, but is only named if it does.
        (
            [*split("a"), LOSS],
            [*split("a", 3 * 1_024), sized(LOSS, 3)],
            "activations and the loss: 3 times the bytes per call",
        ),
        (
            [*split("a"), LOSS],
            [*split("a", 3 * 1_024), LOSS],
            "activations (all_gather[tp], reduce_scatter[tp]): 3 times the bytes per call",
        ),
        # DDP gathers nothing, so nothing shows that the parameters changed.
        (
            [row(BACKWARD, "a", "all_reduce", 64, "gradients")],
            [row(BACKWARD, "a", "all_reduce", 128, "gradients")],
            "more gradients are now reduced: a 64 -> 128 B per call",
        ),
    ],
)
def test_a_sentence_says_only_what_happened(old, new, line):
    assert describe_steps(made(old), made(new)) == [line]


def under_hsdp(rows):
    """The same units, whose gradients are reduced between replicas as well."""
    rows = [replace(one, axis="shard") if one.axis == "dp" else one for one in rows]
    gradients = [one for one in rows if role(one) == "gradients"]
    again = [replace(one, what="all_reduce", axis="replicate") for one in gradients]
    return made([*rows, *again])


def test_ddp_to_hsdp_names_all_gathered_units():
    ddp = made([row(BACKWARD, "", "all_reduce", 768, "gradients", axis="world")])
    hsdp = under_hsdp([*unit("", 64, kept=True), *unit("a", 128)])
    explanation = explain(ddp, hsdp)
    assert explanation.is_exact
    assert {*describe_steps(ddp, hsdp)} == {
        "no more collectives over world",
        "(root), a now gathered and reduced: 7 calls, 704 B in total",
    }


def test_modules_that_leave_an_axis_are_named():
    """As if the unit around a module now gathered its parameters, over all ranks."""
    experts = [replace(one, axis="shard") if one.axis else one for one in unit("a.experts", 64)]
    old = made([*unit("", kept=True), *unit("a", 128), *experts])
    # Each rank had its own experts, whose gathers were smaller.
    new = made([*unit("", kept=True), *unit("a", 128 + 4 * 64)])
    assert "a.experts: no more collectives over shard" in describe_steps(old, new)


def test_a_parent_with_a_number_is_called_a_unit():
    old = made([*unit("", kept=True), *unit("0", 192)])
    new = made([*unit("", kept=True), *unit("0", 128), *unit("0.up", 64)])
    (line,) = describe_steps(old, new)
    assert line.startswith("0.up split off from unit 0")


def test_many_modules_are_called_modules_once():
    names = ["", *(f"{number}.{part}" for number in range(2) for part in "abcdef")]
    assert name_modules(names) == "13 modules in (root), {0..1}"
    assert name_modules(["0", "1.a"]) == "modules 0, 1.a"


def test_a_phase_names_the_only_kind_of_its_collectives():
    def described(*kinds):
        sent = [row(Phase.OPTIMIZER, None, kind, 64) for kind in kinds]
        return describe_steps(profile(), profile(extra=[sent]))

    assert described("broadcast") == [
        "new broadcast[dp] in the optimizer phase, forward unchanged: 1 call of 64 B"
    ]
    assert described("broadcast", "all_reduce")[0].startswith(
        "new collectives in the optimizer phase"
    )


def test_added_units_are_proposed_together():
    """The root becomes a unit only once its reductions by DDP are removed."""
    ddp = made([row(BACKWARD, "", "all_reduce", 768, "gradients", axis="world")])
    hsdp = under_hsdp([*unit("", 64, kept=True), *unit("a", 128)])
    pool = Pool()
    old, target = pool.state(ddp), pool.state(hsdp)

    def units(state):
        between = Between(state, target, old, (ddp.mesh_axes, hsdp.mesh_axes))
        return [step.owners for step in Gathered.propose(between)]

    assert units(old) == []
    assert units(State()) == [("", "a")]


def test_indivisible_count_refutes_a_fraction():
    old = changed(twice(profile()), lambda one: times(one, 3) if one.owner == "layers.1" else one)
    new = changed(old, lambda one: times(one, 1) if one.owner == "layers.1" else one)
    assert explain(old, new).steps == ()
    third = profile(extra=[unit("head", 512)])
    assert not any(
        isinstance(step, Counts) and step.factor < 1 for step in explain(third, new).steps
    )
