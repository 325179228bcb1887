"""Stories of made-up profiles: planted changes are found, and nothing else is said."""

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from sample_profiles import (
    BACKWARD,
    NBYTES,
    RECOMPUTE,
    accumulated,
    changed,
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
    times,
    twice,
    typed,
    unit,
)

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation import sentences
from pytest_fsdp_comm.comm.explanation.search import explain
from pytest_fsdp_comm.comm.explanation.sentences import sentence
from pytest_fsdp_comm.comm.explanation.states import Between, Pool, State
from pytest_fsdp_comm.comm.explanation.steps import Step
from pytest_fsdp_comm.comm.explanation.units import propose_of_units
from pytest_fsdp_comm.reports.changes import render_comparison

# What may be told of each planted change.
PLANTED = {
    more_layers: {"layers"},
    renamed: {"renamed"},
    twice: {"counts"},
    accumulated: {"counts"},
    larger_batch: {"sizes"},
    in_bfloat16: {"dtype"},
    kept: {"freed"},
    reduced_often: {"reduced times"},
    frozen: {"reduced"},
    recomputed: {"recomputed"},
    evaluated: {"counts"},
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (more_layers, "layers: 3 -> 4 modules, each as its siblings"),
        (renamed, "layers is blocks now"),
        (twice, "every count x2"),
        (accumulated, "forwards and backwards x4, reductions of gradients x1"),
        (larger_batch, "activations: x3 bytes in each call"),
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
        (evaluated, "counts of forward x2, of backward x1; (root) kept, and gathered as before"),
    ],
)
def test_a_change_of_the_whole_is_one_line(change, line):
    old = profile(tensor_parallel=True)
    explanation = explain(old, change(old))
    assert explanation.is_exact
    assert [sentence(step) for step in explanation.steps] == [line]
    assert PLANTED[change] == {step.kind for step in explanation.steps}
    assert not any(callable(value) for step in explanation.steps for value in vars(step).values())


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


@pytest.mark.parametrize("seed", range(4))
def test_pairs_of_changes_are_explained_exactly_and_without_anything_else(seed):
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
        told = {step.kind for step in explanation.steps}
        assert told <= PLANTED[first] | PLANTED[second], (names, told)
    assert exact >= 0.9 * len(PAIRS), exact


def test_rows_that_no_step_explains_are_left_and_nothing_is_guessed():
    old = profile()
    chance = random.Random(0)  # noqa: S311  # profiles are no secrets
    new = changed(
        old, lambda one: times(sized(one, chance.choice([2, 3, 7])), chance.randint(1, 3))
    )
    explanation = explain(old, new)
    assert not explanation.is_exact
    assert explanation.before
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
    text = render_comparison(compare(profile(), new), snapshot="s")
    assert len(text.lines) > 1
    assert never not in "\n".join(text.lines)


def test_a_head_that_is_split_off_and_called_for_each_chunk_is_named_as_both():
    rows = unit("head", 1_024)
    rows = [times(one, 4) if one.what == "all_gather" else one for one in rows]
    layers = unit("layers.0", NBYTES)
    old = made([*unit("", NBYTES, kept=True), *layers])
    new = made([*unit("", NBYTES - 1_024, kept=True), *layers, *rows])
    comparison = compare(old, new)
    (step,) = comparison.explanation.steps
    assert sentence(step) == (
        "head split off (root), gathered 4 times in forward: 8 calls, 8.0 KiB in all"
    )
    assert [cause.text[:30] for cause in comparison.causes] == ["called several times in one fo"]


@pytest.mark.parametrize("layers", [2, 0])
def test_a_unit_that_is_split_off_under_accumulation_is_called_as_often_as_the_others(layers):
    """The root is kept from one micro-batch to the next, so that it alone is gathered once."""
    units = [one for n in range(layers) for one in unit(f"layers.{n}", NBYTES)]

    def four_micro_batches(rows):
        is_kept = [one.owner == "" and one.what == "all_gather" for one in rows]
        return [one if kept else times(one, 4) for one, kept in zip(rows, is_kept, strict=True)]

    old = made(four_micro_batches([*unit("", NBYTES, kept=True), *units]))
    rest = unit("", NBYTES - 1_024, kept=True)
    new = made(four_micro_batches([*rest, *units, *unit("embed", 1_024)]))
    comparison = compare(old, new)
    (step,) = comparison.explanation.steps
    assert sentence(step).startswith("embed split off (root): ")
    assert comparison.causes == ()


def test_a_removed_and_an_added_module_of_equal_rows_is_told_as_either():
    old, new = (profile(extra=[unit(name, 512)]) for name in ("adapter", "head"))
    assert [sentence(step) for step in explain(old, new).steps] == [
        "adapter is head now, or another module with equal rows in its place"
    ]


def test_one_unit_whose_name_the_root_takes_has_not_moved_there():
    """From all of a model to adapters, as of TRL: its names have a prefix, its root is a unit."""

    def units(prefix, nbytes):
        layers = [one for n in range(2) for one in unit(f"{prefix}layers.{n}", nbytes)]
        return [*unit(f"{prefix}embed", 512), *layers]

    old = made([*unit("head+model.norm", 516), *units("model.", NBYTES)])
    adapted = [one for one in units("base.model.", NBYTES + 64) if role(one) != "gradients"]
    new = made([*unit("", 4, kept=True), *adapted])
    assert not any("at the top now" in sentence(step) for step in explain(old, new).steps)


def test_a_unit_that_came_has_bytes_that_no_other_unit_lost():
    old, new = profile(), profile(extra=[unit("head", 512)])
    assert [sentence(step) for step in explain(old, new).steps] == [
        "head gathered now, other units as before: 2 calls, 1.0 KiB in all"
    ]
    # The same beside a unit that shrank by other bytes: two changes, neither of which is told so.
    shrunk = changed(new, lambda one: sized(one, Fraction(1, 2)) if one.owner == "" else one)
    assert not any(step.kind == "unit" for step in explain(old, shrunk).steps)


def under_hsdp(rows):
    """The same units, whose gradients are reduced between replicas as well."""
    rows = [replace(one, axis="shard") if one.axis == "dp" else one for one in rows]
    gradients = [one for one in rows if role(one) == "gradients"]
    again = [replace(one, what="all_reduce", axis="replicate") for one in gradients]
    return made([*rows, *again])


def test_ddp_in_place_of_hsdp_tells_every_unit_that_is_gathered_now():
    ddp = made([row(BACKWARD, "", "all_reduce", 768, "gradients", axis="world")])
    hsdp = under_hsdp([*unit("", 64, kept=True), *unit("a", 128)])
    explanation = explain(ddp, hsdp)
    assert explanation.is_exact
    assert {sentence(step) for step in explanation.steps} == {
        "nothing is sent over world any more",
        "(root), a gathered now, other units as before: 3 calls, 320 B in all",
    }


def test_checkpointing_is_told_beside_another_type_of_parameters():
    """A unit that recomputation gathers is not gathered again for backward."""

    def units(nbytes, dtype, phase):
        def change(one):
            is_again = one.owner == "a" and one.phase is BACKWARD
            if is_again and one.what in {"all_gather", "unshard"}:
                one = replace(one, phase=phase)
            return typed(one, dtype) if one.axis else one

        return changed(made([*unit("a", nbytes), *unit("b", nbytes)]), change)

    old, new = units(128, "bfloat16", BACKWARD), units(256, "float32", RECOMPUTE)
    lines = [
        [sentence(step) for step in explain(*sides).steps] for sides in ((old, new), (new, old))
    ]
    assert (
        "forward collectives of a repeated by recomputation in backward: 1 call of 256 B"
        in (lines[0])
    )
    assert "nothing of a is sent again by recomputation any more" in lines[1]


def test_what_is_sent_over_an_axis_that_is_new_is_counted_in_full_beside_a_rename():
    """The rename says where the norm went that had more bytes, and not how many it has now."""

    def step(axis, nbytes):
        norm = row(Phase.OPTIMIZER, None, "all_reduce", nbytes, axis=axis)
        rows = [*unit("", kept=True), *unit("a")]
        return made([norm, *(replace(one, axis=one.axis and axis) for one in rows)])

    old, new = step("dp", 80), step("world", 4)
    assert [sentence(step) for step in explain(old, new).steps] == [
        "all that was sent over dp is sent over world now",
        "sent over world now, over which nothing was: 1 call of 4 B",
    ]


def test_a_unit_that_came_is_not_told_while_another_one_that_came_is_left_out():
    """What DDP reduced of the root has to go before the root is a unit like the other one."""
    ddp = made([row(BACKWARD, "", "all_reduce", 768, "gradients", axis="world")])
    hsdp = under_hsdp([*unit("", 64, kept=True), *unit("a", 128)])
    pool = Pool()
    old, target = pool.state(ddp), pool.state(hsdp)

    def units(state):
        between = Between(state, target, old, (ddp.mesh_axes, hsdp.mesh_axes))
        return [step.owners for step in propose_of_units(between) if step.kind == "unit"]

    assert units(old) == []
    assert units(State()) == [("", "a")]


def test_a_count_that_does_not_divide_refutes_a_fraction():
    old = changed(twice(profile()), lambda one: times(one, 3) if one.owner == "layers.1" else one)
    new = changed(old, lambda one: times(one, 1) if one.owner == "layers.1" else one)
    assert explain(old, new).steps == ()
    third = profile(extra=[unit("head", 512)])
    assert not any(step.kind == "counts" and step.factor < 1 for step in explain(third, new).steps)


def test_a_fraction_is_told_of_gathers_and_reductions_alike_beside_another_change():
    """Half as many steps, none of which computes the norm of its gradients any more."""
    norm = row(Phase.OPTIMIZER, None, "all_reduce", 4)
    old, new = made([*twice(profile()).rows, norm]), profile()
    assert {sentence(step) for step in explain(old, new).steps} == {
        "all counts of forward and backward x1/2",
        "nothing is sent in optimizer any more, forward as before",
    }


def test_the_layers_of_a_large_model_are_one_line():
    old, new = profile(126, tensor_parallel=True), profile(128, tensor_parallel=True)
    text = render_comparison(compare(old, new), snapshot="s")
    assert text.head == "comm_mode differs from s"
    assert text.changes == ("layers: 126 -> 128 modules, each as its siblings",)
    assert "bytes in all" in text.cost[0]


def test_sentences_know_every_kind_of_step():
    def leaves(kind):
        return [leaf for below in kind.__subclasses__() for leaf in leaves(below)] or [kind]

    assert {kind.__name__ for kind in leaves(Step)} <= vars(sentences).keys()
