"""Words that reviewers needed to recognize a change, each with changes that must not have them."""

from dataclasses import replace

import pytest
from sample_profiles import (
    BACKWARD,
    FORWARD,
    NBYTES,
    changed,
    counted,
    evaluated,
    made,
    profile,
    role,
    row,
    split,
    times,
    unit,
)

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.evidence import Evidence
from pytest_fsdp_comm.comm.profile import replace_fields
from pytest_fsdp_comm.reports.changes import render_comparison

OPTIMIZER, OUTSIDE = Phase.OPTIMIZER, Phase.OUTSIDE
NORM = "(_NormPartial(2.0))->(Replicate())"


def told(old, new):
    old, new = (side if hasattr(side, "rows") else made(side) for side in (old, new))
    return [line.strip() for line in render_comparison(compare(old, new), snapshot="s").body]


def causes_in(lines):
    return [line.removeprefix("likely: ") for line in lines if line.startswith("likely: ")]


def hsdp_unit(owner, reduced=1, all_reduced=1, nbytes=NBYTES):
    return [
        row(FORWARD, owner, "all_gather", nbytes, "parameters", axis="shard", count=4),
        row(BACKWARD, owner, "reduce_scatter", nbytes, "gradients", axis="shard", count=reduced),
        row(
            BACKWARD, owner, "all_reduce", nbytes // 4, "gradients", axis="replicate",
            count=all_reduced,
        ),
    ]  # fmt: skip


def ddp(*, buffers=True, gradients=True):
    rows = [
        row(FORWARD, "", "broadcast", 64, "buffers", axis="world"),
        row(BACKWARD, "", "all_reduce", NBYTES, "gradients", axis="world"),
    ]
    return made([one for one, kept in zip(rows, (buffers, gradients), strict=True) if kept])


@pytest.mark.parametrize(
    ("old", "new", "breaks", "is_unwrapped"),
    [
        (ddp(), made([]), True, True),
        # Without buffers, the backward may be missing.
        (ddp(buffers=False), made([]), True, False),
        (ddp(), ddp(buffers=False), False, False),
        (ddp(), ddp(gradients=False), True, False),
        (ddp(gradients=False), made([]), False, False),
    ],
)
def test_module_that_runs_without_ddp_breaks_training(old, new, breaks, is_unwrapped):
    lines = told(old, new)
    lost = "breaks training: gradients of (root) are no longer reduced over world"
    assert any(line.startswith(lost) for line in lines) == breaks
    assert any("called without DDP" in cause for cause in causes_in(lines)) == is_unwrapped


def test_regrouped_units_that_lose_an_axis_break_training():
    """They reduce more gradients, but not over the axis that the root lost, too."""
    nbytes = {"": 4 * NBYTES, "a": NBYTES, "b": NBYTES}
    old = [one for owner, size in nbytes.items() for one in hsdp_unit(owner, nbytes=size)]
    moved = {"": 3 * NBYTES, "a+embed": 2 * NBYTES, "b": NBYTES}
    new = [one for owner, size in moved.items() for one in hsdp_unit(owner, nbytes=size)]
    lost = [one for one in new if one.axis != "replicate"]
    line = "breaks training: gradients of "
    assert not any(text.startswith(line) for text in told(old, new))
    (text,) = (text for text in told(old, lost) if text.startswith(line))
    assert text.startswith(f"{line}(root), b are no longer reduced over replicate")


@pytest.mark.parametrize(
    ("trainable", "text"),
    [
        ({"layers.0.up", "layers.2.up"}, "layers: 3 -> 2 units, the others are still in the model"),
        ({"layers.0.up"}, "layers: 3 -> 2 modules"),
    ],
)
def test_blocks_that_are_no_longer_units_are_not_gone(trainable, text):
    units = frozenset({"", "layers.0", "layers.1"})
    trees = Evidence(units=units, policies={}, trainable=frozenset(trainable))
    fewer = changed(profile(), lambda one: None if one.owner == "layers.2" else one)
    assert compare(profile(), fewer, trees).sentences[0] == text


@pytest.mark.parametrize(
    ("resharded", "is_named"), [({"a.mlp"}, True), ({"a"}, False), (set(), False)]
)
def test_lost_redistribution_of_a_replaced_layout_is_of_the_plan(resharded, is_named):
    rows = [
        row(FORWARD, "a.mlp", "all_reduce", 64, "activations", axis="tp"),
        counted("redistribution", FORWARD, "a.mlp", "(Partial(sum))->(Replicate())"),
    ]
    trees = Evidence(units=frozenset(), policies={}, resharded=frozenset(resharded))
    base = [*unit("a"), *split("b")]
    causes = compare(made([*base, *rows]), made(base), trees).causes
    assert any("parallelize_module plan" in cause.text for cause in causes) == is_named


def over(axis, loss_axis):
    units = [one for number in range(3) for one in unit(f"layers.{number}")]
    loss = row(OUTSIDE, None, "all_reduce", 8, axis=loss_axis)
    return [*(replace(one, axis=one.axis and axis) for one in units), loss]


def test_moved_collectives_are_named_by_their_old_axes():
    """The search renames an axis before it compares other rows."""
    lines = told(over("dp", "dp"), over("shard", "world"))
    assert any(line.startswith("collectives over dp moved to shard") for line in lines)
    assert any("all_reduce[world] instead of all_reduce[dp]" in line for line in lines)
    lines = told(over("dp", "dp"), over("shard", "shard"))
    assert any(line.startswith("all collectives over dp moved to shard") for line in lines)
    assert not any("instead of" in line for line in lines)


def parallel_unit(owner, *, norms=4, reduced=NBYTES, backwards=1):
    """A unit with tensor parallelism, whose norms have a gradient reduction each."""
    return [
        row(FORWARD, owner, "all_gather", NBYTES, "parameters", count=backwards),
        row(BACKWARD, owner, "reduce_scatter", reduced, "gradients", count=backwards),
        row(BACKWARD, owner, "all_reduce", 64, "gradients", axis="tp", count=norms),
    ]


@pytest.mark.parametrize(
    ("old", "new", "is_broken"),
    [
        ({}, {"norms": 2}, True),
        ({}, {"norms": 6}, False),
        # Frozen norms are not in the reduce-scatter; another number of backwards changes both.
        ({}, {"norms": 2, "reduced": NBYTES - 256}, False),
        ({"norms": 8, "backwards": 2}, {"norms": 4}, False),
        # One all-reduce for each backward, as in HSDP.
        ({"norms": 4, "backwards": 4}, {"norms": 1, "backwards": 4}, False),
    ],
)
def test_lost_reductions_of_norms_break_training(old, new, is_broken):
    lines = told(parallel_unit("layers.0", **old), parallel_unit("layers.0", **new))
    lost = "breaks training: fewer gradients of layers.0 are reduced over tp"
    assert any(line.startswith(lost) for line in lines) == is_broken
    assert not is_broken or not any("times (all_reduce)" in line for line in lines)


@pytest.mark.parametrize("has_others", [False, True])
def test_held_gradients_are_claimed_only_if_all_are_reduced_later(has_others):
    """Otherwise, one of two models may be frozen in one of the backwards."""
    reductions = ("layers.1", "layers.2") if has_others else ()

    def reduce_less(one):
        is_reduced = one.phase is BACKWARD and role(one) == "gradients"
        return times(one, 2) if is_reduced and one.owner not in reductions else one

    lines = told(changed(profile(), reduce_less), profile())
    assert lines[0].startswith("gradients of")
    assert any("are held until then" in line for line in lines) != has_others


@pytest.mark.parametrize(
    ("old", "new", "is_named"),
    [
        ((1, 1), (4, 1), True),
        # The replicas reduce in each micro-batch, too, or they reduced before.
        ((1, 1), (4, 4), False),
        ((1, 1), (1, 4), False),
        ((4, 1), (1, 1), False),
    ],
)
def test_only_the_all_reduce_is_deferred(old, new, is_named):
    units = ("", "layers.0", "layers.1")
    old, new = ([one for name in units for one in hsdp_unit(name, *at)] for at in (old, new))
    assert (
        any("call set_requires_all_reduce(False), which" in line for line in told(old, new))
        == is_named
    )


def accumulating(backwards, gathers=1):
    """Three micro-batches; only the given backward reduces the gradients."""
    base = profile()
    calls = {"backwards": backwards}

    def change(one):
        if role(one) == "gradients":
            return replace(one, calls=replace_fields(one.calls, **calls))
        return times(one, gathers) if one.phase is FORWARD or one.what == "reshard" else None

    return changed(base, change)


@pytest.mark.parametrize(
    ("old", "new", "is_known"),
    [
        ("the last of 3 backwards", "the last of 3 backwards", True),
        # More backwards, or an unknown number of them.
        ("the last of 2 backwards", "the last of 6 backwards", False),
        ("", "the last of 3 backwards", False),
        ("", "", False),
    ],
)
def test_as_many_backwards_mean_that_parameters_are_resharded(old, new, is_known):
    lines = told(accumulating(old), accumulating(new, gathers=3))
    assert lines[0].startswith("all forward gathers: 3 times as many, gradient reductions ")
    call = "set_reshard_after_backward(False)"
    says = f"parameters resharded after each backward: is {call} still called?"
    assert (causes_in(lines) == [says]) == is_known


def clipped(count):
    norms = row(OPTIMIZER, None, "all_reduce", 32, count=count)
    return [*profile().rows, norms, counted("redistribution", OPTIMIZER, None, NORM, count)]


def test_norms_may_be_computed_more_often():
    first, cause, *_ = told(clipped(1), clipped(3))
    assert first == "all calls in the optimizer phase (all_reduce[dp]): 3 times as many"
    assert cause.startswith("likely: 3 times as many optimizer steps, or norms are computed more")


def test_other_calls_of_the_optimizer_are_no_norms():
    gathers = [row(OPTIMIZER, f"layers.{number}", "all_gather", 64) for number in range(3)]
    old, new = ([*profile().rows, *(times(one, n) for one in gathers)] for n in (1, 3))
    lines = told(old, new)
    assert lines[0].startswith("all calls in the optimizer phase (all_gather[dp]): 3 times as many")
    assert causes_in(lines) == []


@pytest.mark.parametrize("phase", [OUTSIDE, FORWARD])
def test_calls_of_as_many_steps_may_run_more_often(phase):
    averaged = [row(phase, f"layers.{number}", "all_reduce", 64) for number in range(3)]
    lines = told(averaged, [times(one, 4) for one in averaged])
    assert lines[0] == "all calls (all_reduce[dp]): 4 times as many"
    is_outside = phase is OUTSIDE
    assert any("as many steps issue these calls more often" in line for line in lines) == is_outside


def test_evaluation_of_more_batches_is_no_added_evaluation():
    def without_backward(side):
        return changed(side, lambda one: None if one.phase is BACKWARD else one)

    def resharded(count):
        base = without_backward(profile())
        return changed(base, lambda one: times(one, count) if one.owner else one)

    assert causes_in(told(resharded(2), resharded(6))) == ["more forwards, such as more batches"]
    added = causes_in(told(profile(), evaluated(profile())))
    assert added[0].startswith("forwards without a backward, such as an evaluation")


def test_several_renamed_units_are_not_regrouped():
    def model(*names):
        units = [unit("", kept=True)]
        for number in range(4):
            units += [
                unit(f"layers.{number}.{name}", NBYTES * at) for at, name in enumerate(names, 2)
            ]
        return [one for rows in units for one in rows]

    old = model("attention", "feed_forward")
    replaced = "(or replaced by a module with the same rows)"
    lines = told(old, model("self_attn", "mlp"))
    assert lines == [
        f"module layers.*.attention renamed to layers.*.self_attn {replaced}; module "
        f"layers.*.feed_forward renamed to layers.*.mlp {replaced}; all communication is unchanged"
    ]
    # Other sizes in units of other names are regrouped parameters.
    assert told(old, model("mlp", "self_attn", "norm")[: len(old)]) != lines


@pytest.mark.parametrize(("reduced", "is_inside"), [(3 * NBYTES, True), (NBYTES, False)])
def test_replicated_module_includes_the_units_inside(reduced, is_inside):
    others = profile().rows
    tower = [*unit("tower"), *unit("tower.blocks.0"), *unit("tower.blocks.1")]
    replicated = row(BACKWARD, "tower", "all_reduce", reduced, "gradients")
    first, *further = told([*others, *tower], [*others, replicated])
    names = "tower, tower.blocks.{0..1}" if is_inside else "tower"
    assert f"{names} replicated instead of sharded: " in "\n".join((first, *further))
    assert any("tower.blocks.{0..1} no longer gathered" in line for line in further) != is_inside


def gathered_in_full(*owners):
    move = "(Shard(dim=0))->(Replicate())"
    return [
        one
        for owner in owners
        for one in (
            row(OUTSIDE, owner, "all_gather", NBYTES, "parameters"),
            counted("redistribution", OUTSIDE, owner, move),
        )
    ]


def test_modules_that_were_gathered_in_full_before_are_named():
    base = profile().rows
    beside = "full parameters gathered outside forward and backward, beside lora as before: "
    lines = told(
        [*base, *gathered_in_full("lora")], [*base, *gathered_in_full("embed", "head", "lora")]
    )
    assert lines[0].startswith(f"embed, head: {beside}")
    lines = told(base, [*base, *gathered_in_full("embed", "head")])
    assert "beside" not in lines[0]


def flat_gradients(*, inputs=("mlp",), nbytes=4_096, layers=2):
    """Tensor parallelism by hand, and a buffer with all gradients."""
    rows = [row(OUTSIDE, None, "all_reduce", nbytes)] * bool(nbytes)
    for number in range(layers):
        name = f"layers.{number}"
        rows.append(row(FORWARD, f"{name}.down", "all_reduce", 64, "activations", axis="tp"))
        rows += [
            row(BACKWARD, f"{name}.{one}", "all_reduce", 64, "activations", axis="tp")
            for one in inputs
        ]
    return rows


@pytest.mark.parametrize(
    ("new", "is_broken"),
    [
        ({"inputs": ()}, True),
        # Only a loss is reduced outside, or other gradients, or the layers were removed.
        ({"inputs": (), "nbytes": 4}, False),
        ({"inputs": (), "nbytes": 2_048}, False),
        ({"inputs": (), "layers": 0}, False),
        ({"inputs": ("mlp",), "layers": 1}, False),
        ({"inputs": ("up",)}, False),
    ],
)
def test_lost_gradients_of_inputs_break_training_beside_flat_gradients(new, is_broken):
    old = flat_gradients(nbytes=4 if new.get("nbytes") == 4 else 4_096)
    text = "gradients of the inputs of layers.{0..1}.mlp are no longer reduced over tp in backward"
    first = told(old, flat_gradients(**new))[0]
    assert (first == f"breaks training: {text}") == is_broken
    assert first.startswith("breaks training: ") == is_broken


def on_ranks(count, *ranks, nbytes=64, peer=0):
    sent = row(OUTSIDE, None, "send", nbytes, count=count)
    calls = (replace(sent.calls[0], peer=peer),)
    return replace(sent, calls=calls, ranks=ranks)


def test_only_ranks_that_differ_are_listed():
    old = [on_ranks(4, 0, peer=1), on_ranks(8, 1, 2), on_ranks(4, 3, peer=-1)]
    new = [on_ranks(8, 0, peer=1), on_ranks(8, 1, 2), on_ranks(4, 3, peer=-1)]
    (first, *_) = told(old, new)
    assert first == (
        "(no-module) outside forward and backward: send[dp] on rank 0: 4 -> 8 (+4), 256 -> 512 B "
        "per rank"
    )
    new = [
        on_ranks(8, 0, nbytes=32, peer=1),
        on_ranks(16, 1, 2, nbytes=32),
        on_ranks(8, 3, nbytes=32, peer=-1),
    ]
    (first, *_) = told(old, new)
    assert first == (
        "(no-module) outside forward and backward: send[dp] on ranks 0, 3: 4 -> 8 (+4), same "
        "bytes; on ranks 1-2: 8 -> 16 (+8), same bytes"
    )


def test_many_changes_of_ranks_are_counted():
    old = [on_ranks(rank + 1, rank) for rank in range(6)]
    (first, *_) = told(old, [on_ranks(2 * (6 - rank), rank) for rank in range(6)])
    assert first.endswith("; 3 other changes")
    assert first.count(" on rank ") == 3


def test_added_call_is_named_if_others_have_another_size():
    def dispatched(counts):
        parts = [
            row(FORWARD, "moe", "all_to_all", nbytes, count=n).calls[0] for nbytes, n in counts
        ]
        return [replace(row(FORWARD, "moe", "all_to_all", 0), calls=tuple(sorted(parts)))]

    old, new = dispatched([(64, 1), (1_024, 2)]), dispatched([(64, 2), (1_024, 2)])
    assert ", added x1 of 64 B float32" in told(old, new)[0]
    assert ", removed x1 of 64 B float32" in told(new, old)[0]
    # If both changed, or there is only one kind, the sums say it.
    kinds = [(64, 1), (1_024, 2)], [(64, 2), (1_024, 3)]
    for before, after in (kinds, ([(64, 1)], [(64, 2)])):
        (first, *_) = told(dispatched(before), dispatched(after))
        assert "added" not in first


@pytest.mark.parametrize("has_norms", [True, False])
def test_other_number_of_norms_follows_from_frozen_parameters(has_norms):
    def model(reduced, nbytes):
        rows = [
            one
            for one in profile().rows
            if reduced or (one.owner, role(one)) != ("layers.2", "gradients")
        ]
        rows.append(row(OPTIMIZER, None, "all_reduce", nbytes))
        return [*rows, *[counted("redistribution", OPTIMIZER, None, NORM)] * has_norms]

    lines = told(model(reduced=True, nbytes=64), model(reduced=False, nbytes=48))
    assert lines[0].startswith("breaks training: gradients of layers.2 no longer reduced")
    assert lines[1].startswith("likely: ") == has_norms
    assert any("all_reduce[dp] x1, 64 -> 48 B per rank" in line for line in lines)


def exchanged(what, *, differs):
    if not differs:
        return [row(OUTSIDE, None, what, 512)]
    return [
        replace(row(OUTSIDE, None, what, size), ranks=(at,)) for at, size in enumerate((512, 256))
    ]


def test_half_the_size_in_twice_as_many_calls_is_not_the_same_size():
    gathers = [row(FORWARD, "a", "all_gather", 64, "activations", count=2)]
    exchanges = [row(FORWARD, "a", "all_to_all", 32, "activations", count=4)]
    (line,) = (text for text in told(gathers, exchanges) if "instead of" in text)
    assert line.endswith(", same bytes in all")


def test_same_size_is_said_of_the_rank_that_sends_most():
    (alike, *_) = told(exchanged("scatter", differs=False), exchanged("broadcast", differs=False))
    assert alike.endswith(
        "broadcast instead of scatter over dp outside forward and backward, same size"
    )
    (first, *_) = told(exchanged("scatter", differs=True), exchanged("broadcast", differs=False))
    assert first.endswith(", same size on the rank that sends most")


@pytest.mark.parametrize(
    ("nbytes", "cause"),
    [
        (
            NBYTES,
            "each gradient is sent once now, or these calls send something else, such as weights "
            "that are averaged after several steps",
        ),
        (4 * NBYTES, "gradients are flattened into buffers"),
    ],
)
def test_smaller_buffers_may_hold_no_gradients(nbytes, cause):
    old = [
        row(BACKWARD, f"layers.{at}", "all_reduce", NBYTES // 4, "gradients", count=4)
        for at in range(4)
    ]
    lines = told(old, [row(OUTSIDE, None, "all_reduce", nbytes)])
    assert causes_in(lines) == [cause]


def test_unit_that_stays_gathered_from_step_to_step_is_stale():
    """As after `set_reshard_after_backward(False)` in the whole run, or on some units."""

    def stay_gathered(old, *owners):
        return changed(
            old, lambda one: one if one.owner not in owners or role(one) == "gradients" else None
        )

    names = ("layers.0", "layers.2")
    lines = told(profile(), stay_gathered(profile(), *names))
    assert lines[0] == (
        "breaks training: layers.{0,2} stay gathered from step to step, so forward does not use "
        "what the optimizer changed, e.g. after set_reshard_after_backward(False)"
    )
    # Forward reshards them, and backward gathers them again.
    between = changed(
        profile(),
        lambda one: (
            None
            if one.owner in names
            and (one.phase, one.what)
            in {(FORWARD, "all_gather"), (FORWARD, "unshard"), (BACKWARD, "reshard")}
            else one
        ),
    )
    assert told(profile(), between)[0] == lines[0]
    # Resharded after backward, as after an evaluation, gathered after the optimizer, or replicated.
    resharded = changed(
        profile(),
        lambda one: (
            None
            if one.owner in names and one.phase is FORWARD and one.what in {"all_gather", "unshard"}
            else one
        ),
    )
    gathered = [row(OUTSIDE, name, "all_gather", 2 * NBYTES, "parameters") for name in names]
    replicated = [row(BACKWARD, name, "all_reduce", 2 * NBYTES, "gradients") for name in names]
    alone = [one for one in profile().rows if one.owner not in names]
    kept = stay_gathered(profile(), *names)
    for new in (resharded, [*kept.rows, *gathered], [*alone, *replicated], alone):
        assert not any("stay gathered" in line for line in told(profile(), new))


@pytest.mark.parametrize(("root", "is_merged"), [(2 * NBYTES, True), (NBYTES, False)])
def test_missing_layers_may_be_merged_into_another_unit(root, is_merged):
    old = profile(layers=4)
    new = [*unit("", root, kept=True)]
    new += [one for one in profile(layers=2).rows if one.owner]
    text = "\n".join(told(old, new))
    merged = ", merged into another unit" * is_merged
    assert f"layers: 4 -> 2 modules, the others removed{merged} or not run" in text


@pytest.mark.parametrize("kinds", [("send", "recv"), ("send", "all_reduce")])
def test_fewer_transfers_may_be_another_placement_of_stages(kinds):
    sent = [row(OUTSIDE, None, kind, 64, count=6) for kind in kinds]
    fewer = [replace(one, calls=(replace(one.calls[0], count=4),)) for one in sent]
    placed = "fewer micro-batches or stages, or stages placed on other ranks"
    assert causes_in(told(sent, fewer)) == [placed] * ("recv" in kinds)
