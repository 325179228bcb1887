"""Causes of rows that no step explains: options of DDP, schedules of pipelines, lost backwards."""

from dataclasses import replace

import pytest
from sample_profiles import (
    BACKWARD,
    DP,
    FORWARD,
    TP,
    changed,
    counted,
    made,
    profile,
    row,
    times,
    unit,
)

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.profile import GatheredPeak, replace_fields
from pytest_fsdp_comm.reports.changes import render_comparison

OUTSIDE = Phase.OUTSIDE
BUCKET = row(BACKWARD, "", "all_reduce", 4_096, "gradients", axis="world")
BUFFERS = row(FORWARD, "", "broadcast", 512, "buffers", axis="world")
MAP = row(BACKWARD, "head", "all_reduce", 40, "unused parameters", axis="world")
BROADCAST = row(OUTSIDE, None, "broadcast", 512, axis="world")
LOOKS = "looks for unused parameters (find_unused_parameters)"
BROADCASTS = "broadcasts buffers (broadcast_buffers, or the model's buffers)"


def told(old, new):
    failure = render_comparison(compare(made(old), made(new)), snapshot="s")
    return [line.strip() for line in failure.body]


def likely(old, new):
    mark = "likely: "
    return [line.removeprefix(mark) for line in told(old, new) if line.startswith(mark)]


@pytest.mark.parametrize(("option", "text"), [(MAP, LOOKS), (BUFFERS, BROADCASTS)])
def test_option_of_ddp_is_named_second(option, text):
    assert told([BUCKET], [BUCKET, option])[1] == f"likely: DDP now {text}"
    assert told([BUCKET, option], [BUCKET])[1] == f"likely: DDP no longer {text}"


def test_new_wrapper_is_no_option_of_ddp():
    reduced = row(Phase.OPTIMIZER, "head", "reduce_scatter", 64, "gradients", axis="world")
    wrapped = "(root) is now wrapped in DistributedDataParallel"
    assert likely([reduced], [reduced, BUCKET, BUFFERS]) == [wrapped]
    # Another module already had a wrapper.
    other = row(BACKWARD, "layers", "all_reduce", 64, "gradients", axis="world")
    assert likely([other, BUCKET], [other, BUCKET, BUFFERS]) == [f"DDP now {BROADCASTS}"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Another broadcast, DDP itself, or no backward is another change.
        ([BUCKET, BUFFERS], [BUCKET, BUFFERS, BROADCAST]),
        ([BROADCAST], [BUCKET, BUFFERS, BROADCAST]),
        ([BUCKET, BUFFERS], [BUFFERS]),
    ],
)
def test_other_changes_are_no_option_of_ddp(old, new):
    assert not any("DDP" in text for text in likely(old, new))


def accumulating(owner, *, forward_gathers, reshards):
    return [
        row(FORWARD, owner, "all_gather", 1_024, "parameters", count=forward_gathers),
        row(BACKWARD, owner, "all_gather", 1_024, "parameters", count=3),
        row(BACKWARD, owner, "reduce_scatter", 1_024, "gradients"),
        counted("reshard", FORWARD, owner, "unshard", forward_gathers),
        counted("reshard", FORWARD, owner, "reshard", 3),
        counted("reshard", BACKWARD, owner, "unshard", 3),
        counted("reshard", BACKWARD, owner, "reshard", reshards),
    ]


@pytest.mark.parametrize(
    ("owner", "forward_gathers", "reshards", "is_kept"),
    [
        ("layers.0", 1, 1, True),
        # Forward gathers as often as before, or less for another reason.
        ("layers.0", 3, 1, False),
        ("layers.0", 1, 3, False),
    ],
)
def test_units_kept_between_micro_batches_are_named(owner, forward_gathers, reshards, is_kept):
    old = accumulating(owner, forward_gathers=3, reshards=3)
    new = accumulating(owner, forward_gathers=forward_gathers, reshards=reshards)
    kept = "the units are kept from one micro-batch to the next"
    assert any(text.startswith(kept) for text in likely(old, new)) == is_kept


def stage(forwards, backwards, sends=4):
    """Rows of two units in a pipeline; the second is gathered once more in forward."""
    rows = []
    for number, more in enumerate((0, 1)):
        for phase, count in ((FORWARD, forwards + more), (BACKWARD, backwards)):
            owner = f"layers.{number}"
            rows.append(row(phase, owner, "all_gather", 1_024, "parameters", count=count))
            rows.append(counted("reshard", phase, owner, "unshard", count))
    return [*rows, row(OUTSIDE, None, "send", 256, axis="world", count=sends)]


SCHEDULE = "another pipeline schedule, which runs micro-batches in a different order"


def test_units_gathered_at_other_times_mean_another_schedule():
    assert likely(stage(5, 1), stage(3, 3)) == [SCHEDULE]
    assert likely(stage(3, 3), stage(5, 1)) == [SCHEDULE]
    # Whether something hides the sends depends on the schedule.
    *units, sent = stage(3, 3)
    exposed = tuple(replace(call, exposed=True) for call in sent.calls)
    assert told(stage(5, 1), [*units, replace(sent, calls=exposed)])[1] == f"likely: {SCHEDULE}"


@pytest.mark.parametrize(
    "new",
    [
        stage(3, 3, sends=8),  # other micro-batches or stages
        stage(7, 3),  # more of both
        stage(3, 3)[:-1],  # no pipeline any more
    ],
)
def test_other_changes_are_no_schedule(new):
    assert SCHEDULE not in likely(stage(5, 1), new)


GATHERED = row(OUTSIDE, None, "all_gather", 1_024)
BACK = row(BACKWARD, None, "reduce_scatter", 1_024)
IN_A = row(BACKWARD, "a", "all_reduce", 1_024)
DETACHED = (
    "gradients no longer pass through a collective of forward: detach(), a call without "
    "gradients, or a backward that no longer communicates"
)
ATTACHED = "gradients now pass through a collective of forward, or backward repeats it"


def test_lost_backward_of_a_collective_is_explained():
    assert told([BUCKET, GATHERED, BACK], [BUCKET, GATHERED])[1] == f"likely: {DETACHED}"
    assert told([BUCKET, GATHERED], [BUCKET, GATHERED, BACK])[1] == f"likely: {ATTACHED}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([BUCKET, GATHERED, BACK], [BUCKET]),  # the forward collective is gone, too
        ([BUCKET, GATHERED], [BUCKET, GATHERED, BACK]),
        # The collective of forward belongs to another module, as under tensor parallelism.
        ([BUCKET, GATHERED, IN_A], [BUCKET, GATHERED]),
        (
            [BUCKET, GATHERED, BACK],
            [BUCKET, GATHERED, row(BACKWARD, None, "reduce_scatter", 2_048)],
        ),
        (
            [BUCKET, GATHERED, BACK],
            [BUCKET, GATHERED, row(BACKWARD, None, "all_reduce", 1_024)],
        ),
    ],
)
def test_other_changes_lose_no_backward(old, new):
    assert DETACHED not in likely(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([BUCKET], [BUCKET, GATHERED, BACK]),  # the forward collective is new, too
        ([BUCKET, GATHERED, BACK], [BUCKET, GATHERED]),
        ([BUCKET, GATHERED], [BUCKET, GATHERED, IN_A]),
        ([BUCKET, GATHERED, BACK], [BUCKET, GATHERED, row(BACKWARD, None, "all_reduce", 1_024)]),
    ],
)
def test_other_changes_gain_no_backward(old, new):
    assert ATTACHED not in likely(old, new)


def test_gradients_alone_may_be_reduced_twice():
    twice = row(BACKWARD, "", "all_reduce", 4_096, "gradients", axis="world", count=2)
    other = row(BACKWARD, "head", "all_reduce", 64, "gradients", axis="world")
    others = row(BACKWARD, "head", "all_reduce", 64, "gradients", axis="world", count=2)
    again = ", or each gradient is reduced 2 times"
    assert any(text.endswith(again) for text in likely([BUCKET, other], [twice, others]))
    # Calls of forward show how many steps ran.
    metric = row(FORWARD, None, "all_gather", 64)
    metrics = row(FORWARD, None, "all_gather", 64, count=2)
    old, new = [BUCKET, other, metric], [twice, others, metrics]
    assert not any(again in text for text in likely(old, new))


def test_objects_have_no_bytes_in_a_sentence():
    reduced = row(OUTSIDE, None, "all_reduce", 4)
    gathered = row(OUTSIDE, None, "all_gather", 0, count=2)
    line = "all_gather instead of all_reduce over dp outside forward and backward"
    assert told([BUCKET, reduced], [BUCKET, gathered])[0] == line
    sized = row(OUTSIDE, None, "all_gather", 16)
    assert told([BUCKET, reduced], [BUCKET, sized])[0] == f"{line}, 4 -> 16 B"


def test_gradients_gathered_by_an_optimizer_are_not_reduced():
    unit = [row(FORWARD, "layers.0", "all_gather", 1_024, "parameters")]
    unit += [row(BACKWARD, "layers.0", "reduce_scatter", 1_024, "gradients")]
    muon = row(OUTSIDE, "layers.0", "all_gather", 1_024, "gradients")
    lines = told([*unit, muon], unit)
    assert lines[0] == "gradients of layers.0 no longer sent by all_gather[dp]"
    assert not any("breaks training" in line for line in lines)


def test_bytes_of_another_kind_are_those_of_one_rank():
    """Ranks with different rows are not added up."""
    scattered = [
        replace(row(BACKWARD, None, "scatter", 1_024, count=2), ranks=(rank,)) for rank in range(8)
    ]
    ring = [row(BACKWARD, None, kind, 512) for kind in ("send", "recv")]
    line = "recv and send instead of scatter over dp in backward, 2.0 -> 1.0 KiB"
    assert told([BUCKET, *scattered], [BUCKET, *ring])[0] == line


def test_buckets_of_different_sizes_have_one_new_dtype():
    def buckets(dtype, *sizes):
        calls = (
            row(BACKWARD, "", "all_reduce", size, "gradients", dtype=dtype).calls[0]
            for size in sizes
        )
        return replace(BUCKET, calls=replace_fields(tuple(calls)))

    lines = told([buckets("float32", 4_096, 1_024)], [buckets("float16", 2_048, 512)])
    assert lines[:2] == [
        "gradients[world] float32 -> float16, half the bytes",
        # Without units, there is no MixedPrecisionPolicy.
        "likely: a communication hook, or parameters of another dtype",
    ]


def test_calls_over_other_ranks_are_not_unchanged():
    norm = row(Phase.OPTIMIZER, None, "all_reduce", 4)
    old, new = profile(extra=[[norm]]), profile()
    (first, *_) = render_comparison(compare(old, new), snapshot="s").changes
    assert first.text == "no more collectives in the optimizer phase, forward unchanged"
    moved = replace(new, mesh_axes=(replace(DP, dims=((4, 1),)),))
    texts = [entry.text for entry in render_comparison(compare(old, moved), snapshot="s").changes]
    assert "no more collectives in the optimizer phase" in texts


def test_gradients_on_another_number_of_ranks_are_not_of_fewer_parameters():
    def replicated(shards):
        sent = [
            row(FORWARD, "layers.0", "all_gather", 4_096, "parameters", axis="tp"),
            row(BACKWARD, "layers.0", "reduce_scatter", 4_096, "gradients", axis="tp"),
            row(BACKWARD, "layers.0", "all_reduce", 4_096 // shards, "gradients", axis="dp"),
        ]
        return made(sent)

    line = "gradients of fewer parameters are now reduced, gathers unchanged: layers.0"
    assert first_text(replicated(4), replicated(8)) == f"{line} 1.0 KiB -> 512 B per call"
    larger = replace(replicated(8), mesh_axes=(DP, replace(TP, size=8, dims=((8, 1),))))
    changes = render_comparison(compare(replicated(4), larger), snapshot="s").changes
    assert "gradients of layers.0 1.0 KiB -> 512 B per call" in [entry.text for entry in changes]


def first_text(old, new):
    return render_comparison(compare(old, new), snapshot="s").changes[0].text


def test_default_group_is_no_renamed_mesh_axis():
    def over(axis):
        return replace(profile(), mesh_axes=(replace(DP, name=axis),), rows=moved_to(axis))

    def moved_to(axis):
        return tuple(replace(one, axis=axis if one.axis else "") for one in profile().rows)

    assert first_text(over("world"), over("dp")) == (
        "collectives over world are now over dp (same ranks)"
    )
    assert first_text(over("data"), over("dp")) == "mesh axis data renamed to dp (same ranks)"


def test_missing_layers_are_removed_or_not_run():
    assert (
        first_text(profile(4), profile(3))
        == "layers: 4 -> 3 modules, the others removed or not run"
    )
    assert first_text(profile(3), profile(4)).startswith("layers: 3 -> 4 modules, the new ones")


def test_removed_layers_do_not_run_twice():
    """Three layers are removed, and each of the others runs twice in forward."""
    twice = changed(
        profile(3), lambda one: times(one, 2) if one.phase is FORWARD and one.owner else one
    )
    texts = [
        entry.text for entry in render_comparison(compare(profile(6), twice), snapshot="s").changes
    ]
    assert texts[0] == "layers: 6 -> 3 modules, the others removed or not run"
    assert not any("layers.{0..5}" in text for text in texts)
    assert any("layers.{0..2}" in text or "forward calls: twice" in text for text in texts)


def test_collectives_of_user_code_are_named_if_all_are_half():
    def loss(count):
        return made(
            [
                BUCKET,
                row(OUTSIDE, None, "all_gather", 64, axis="world", count=count),
                row(BACKWARD, None, "scatter", 64, axis="world", count=count),
            ]
        )

    text = first_text(loss(2), loss(1))
    assert text == (
        "all forward and backward calls (scatter[world]): half as many, gradient reductions "
        "unchanged"
    )


def test_calls_that_send_copies_are_not_new_calls():
    def averaging(owner, dtype, nbytes, count=1):
        return row(OUTSIDE, owner, "all_reduce", nbytes, dtype=dtype, count=count)

    modules = [averaging(f"layers.{number}", "float32", 1_024) for number in range(3)]
    copies = averaging(None, "bfloat16", 512, count=3)
    where = "all_reduce[dp] outside forward and backward: 3 calls now send"
    assert told([BUCKET, *modules], [BUCKET, copies])[0] == (
        f"{where} other tensors than those of layers.{{0..2}} in bfloat16 instead of float32, "
        "3.0 -> 1.5 KiB"
    )
    assert told([BUCKET, copies], [BUCKET, *modules])[0] == (
        f"{where} tensors of layers.{{0..2}} in float32 instead of bfloat16, 1.5 -> 3.0 KiB"
    )
    # More or fewer calls are new or lost calls.
    more = averaging(None, "bfloat16", 512, count=4)
    assert not any("now send" in line for line in told([BUCKET, *modules], [BUCKET, more]))


def placed(ranks, *owners):
    """Rows of units that only some ranks gather, and what pipeline stages send."""
    rows = [row(FORWARD, owner, "all_gather", 1_024, "parameters") for owner in owners]
    sent = replace(row(OUTSIDE, None, "send", 256, axis="world"), ranks=(0, 8))
    return [*(replace(one, ranks=ranks) for one in rows), sent]


PAIR = ("send", "recv")
MOVED = "pipeline stages: layers.1 moved from rank 0 to rank 8"


def test_units_that_moved_to_another_stage_are_named():
    def is_moved(*sides):
        return MOVED in told(*sides)

    old = [*placed((0,), "layers.0", "layers.1"), *placed((8,), "layers.2")[:-1]]
    new = [*placed((0,), "layers.0"), *placed((8,), "layers.1", "layers.2")[:-1]]
    assert is_moved(old, new)
    # Without stages, on another mesh, or if the unit is gone, nothing moved.
    assert not is_moved([one for one in old if one.axis == "dp"], new)
    assert not is_moved(old, [*new, replace(BUCKET, axis="tp")])
    assert not is_moved(old, [*placed((0,), "layers.0"), *placed((8,), "layers.2")[:-1]])
    assert not is_moved(old, [*placed((0,), "layers.0"), *placed((0, 8), "layers.2")[:-1]])
    # Rank 0 still gathers it.
    both = [*placed((0,), "layers.0"), *placed((0, 8), "layers.1")[:-1]]
    assert not is_moved(old, [*both, *placed((8,), "layers.2")[:-1]])
    # All ranks gather it, in backward with more calls on one of them.
    more = row(BACKWARD, "layers.1", "all_gather", 1_024, "parameters")
    before, after = ([*placed((), "layers.1"), replace(more, ranks=(rank,))] for rank in (0, 1))
    assert not is_moved(before, after)


def test_larger_tensors_between_stages_are_activations():
    def stages(size, kinds=PAIR):
        return [BUCKET, *(row(OUTSIDE, None, kind, size, axis="world") for kind in kinds)]

    assert told(stages(256), stages(512))[:2] == [
        "activations (recv[world], send[world]): twice the bytes per call",
        "likely: a different batch size, sequence length or model width",
    ]
    others = ("all_gather", "all_reduce")
    assert "activations" not in told(stages(256, others), stages(512, others))[0]
    # Storage proves what these send.
    old, new = (
        [BUCKET, *(row(OUTSIDE, None, kind, size, "gradients", axis="world") for kind in PAIR)]
        for size in (256, 512)
    )
    assert not any("activations" in line for line in told(old, new))


def test_forward_comes_before_the_backward_that_follows_from_it():
    gathered = row(OUTSIDE, None, "all_gather", 1_024)
    back = [replace(row(BACKWARD, None, "scatter", 4_096), ranks=(rank,)) for rank in range(4)]
    base = [row(BACKWARD, "", "all_reduce", 4_096, "gradients")]
    first, second, *_ = told(base, [*base, gathered, *back])
    assert first.startswith("(no-module) outside forward and backward: all_gather[dp] 0 -> 1")
    # Ranks with the same text share it.
    assert (
        second
        == "(no-module) in backward: scatter[dp] on ranks 0-3: 0 -> 1 (+1), 0 -> 4.0 KiB per rank"
    )


def test_fewer_calls_of_the_same_bytes_say_so():
    two, one = (
        row(FORWARD, "a", "all_gather", 2_048 // count, axis="tp", count=count) for count in (2, 1)
    )
    assert (
        told([BUCKET, two], [BUCKET, one])[0]
        == "a in forward: all_gather[tp] 2 -> 1 (-1), same bytes"
    )
    less = row(FORWARD, "a", "all_gather", 1_024, axis="tp")
    assert "same bytes" not in told([BUCKET, two], [BUCKET, less])[0]


def test_gradients_reduced_over_another_axis_are_not_also_reduced():
    def user_code(*axes):
        reduced = [row(BACKWARD, "b", "all_reduce", 64, "gradients", axis=axis) for axis in axes]
        metrics = [row(OUTSIDE, None, "all_reduce", 4, axis=axis) for axis in ("dp", "world")]
        return [*unit("a"), *metrics, *reduced]

    lines = told(user_code("dp"), user_code("world"))
    assert lines[0].startswith("gradients of b now reduced by all_reduce[world]")
    also = "gradients of b now also reduced by all_reduce[world]"
    assert told(user_code("dp"), user_code("dp", "world"))[0].startswith(also)


def test_new_modules_have_no_old_size():
    old, new = profile(2), larger(profile(4))
    lines = [entry.text for entry in render_comparison(compare(old, new), snapshot="s").changes]
    assert "unit sizes changed: layers.{0..1} 10.0 -> 20.0 KiB per gather" in lines


def larger(base):
    def grow(one):
        is_of_layer = (one.owner or "").startswith("layers.") and one.axis
        calls = tuple(replace(call, nbytes=2 * call.nbytes) for call in one.calls)
        return replace(one, calls=calls) if is_of_layer else one

    return changed(base, grow)


def test_all_other_ranks_are_not_named_as_one_rank():
    def sent(*ranks):
        rows = (row(OUTSIDE, None, "all_gather", 64) for _ in ranks)
        return [replace(one, ranks=on) for one, on in zip(rows, ranks, strict=True)]

    base = [row(BACKWARD, "", "all_reduce", 4_096, "gradients")]
    (line,) = [text for text in told(base, [*base, *sent((), (3,))]) if "all_gather" in text][:1]
    assert "all ranks" in line


def test_new_sizes_of_parameters_leave_the_mesh_first():
    old, new = profile(2), larger(profile(2))
    moved = replace(new, mesh_axes=(replace(DP, dims=((4, 1),)), *new.mesh_axes[1:]))
    first, *_ = render_comparison(compare(old, moved), snapshot="s").changes
    assert (first.text.partition(":")[0], first.is_effect) == ("mesh", False)


NUMBER = row(Phase.OPTIMIZER, None, "all_reduce", 4)


@pytest.mark.parametrize(
    ("rows", "is_named"),
    [
        ([NUMBER], True),
        # Another size, kind or phase is something else.
        ([row(Phase.OPTIMIZER, None, "all_reduce", 8)], False),
        ([NUMBER, row(Phase.OPTIMIZER, None, "all_gather", 4)], False),
        ([row(OUTSIDE, None, "all_reduce", 4)], False),
    ],
)
def test_lost_number_of_the_optimizer_may_be_a_norm(rows, is_named):
    base = [*unit("a"), *unit("b")]
    text = "a number is {} reduced: the norm of FSDP1's clip_grad_norm_ (torch's function of this "
    text += "name uses the norm of each shard), or a scaler's check"
    assert (text.format("no longer") in likely([*base, *rows], base)) == is_named
    assert (text.format("now") in likely(base, [*base, *rows])) == is_named


@pytest.mark.parametrize(
    ("rows", "is_named"),
    [
        ([BUCKET, BUFFERS], True),
        # With gathers, activations or a loss, the other calls show how many forwards ran.
        (unit("a"), False),
        ([BUCKET, row(FORWARD, "a", "all_reduce", 64, "activations", axis="tp")], False),
        ([BUCKET, row(OUTSIDE, None, "all_reduce", 4)], False),
    ],
)
def test_doubled_calls_of_ddp_may_be_a_lost_no_sync(rows, is_named):
    (cause,) = likely(rows, [times(entry, 2) for entry in rows])
    assert cause.startswith("2 times as many steps")
    assert ("no_sync() no longer covers forward and backward" in cause) == is_named


@pytest.mark.parametrize(("nbytes", "how"), [(300, "more"), (100, "fewer")])
def test_other_peak_of_the_same_calls_is_named(nbytes, how):
    def first_change(new_rows):
        old, new = (
            replace(made(rows), peaks=(GatheredPeak(nbytes=size),))
            for rows, size in ((unit("a"), 200), (new_rows, nbytes))
        )
        return render_comparison(compare(old, new), snapshot="s").changes[0].text

    text = f"all calls unchanged, but {how} parameters are gathered at the same time"
    assert first_change(unit("a")) == text
    # If calls changed too, they explain it.
    assert first_change([*unit("a"), *unit("b")]) != text


@pytest.mark.parametrize(("times_sent", "is_named"), [(2, True), (1, False), (3, False)])
def test_micro_batches_are_as_many_as_sends(times_sent, is_named):
    send = row(OUTSIDE, None, "send", 64, axis="dp")
    old = [*unit("a"), *unit("b")]
    new = [times(entry, 2) if entry.phase is FORWARD else entry for entry in old]
    causes = likely([*old, send], [*new, times(send, times_sent)])
    assert ("2 times as many micro-batches" in causes) == is_named


def test_recomputation_ends_although_gathers_move_to_backward():
    """The experts of the last layer are in no prefetch list."""
    phases = {True: Phase.RECOMPUTE, False: BACKWARD}

    def step(*, is_recomputed):
        rows = []
        for owner in ("layers.0.experts", "layers.1.experts"):
            gathered = phases[is_recomputed and owner == "layers.1.experts"]
            sent = [FORWARD, BACKWARD, *([Phase.RECOMPUTE] if is_recomputed else [])]
            rows += [
                row(phase, owner, "all_to_all", 64, "activations", axis="tp") for phase in sent
            ]
            for phase in (FORWARD, gathered):
                rows.append(row(phase, owner, "all_gather", 1_024, "parameters"))
                rows.append(counted("reshard", phase, owner, "unshard"))
            rows.append(row(BACKWARD, owner, "reduce_scatter", 1_024, "gradients"))
        return rows

    old, new = step(is_recomputed=True), step(is_recomputed=False)
    who = "layers.{0..1}.experts"
    assert told(old, new)[0] == f"recomputation no longer repeats the forward collectives of {who}"
    assert likely(old, new)[0].startswith("activation checkpointing was switched off")
    assert told(new, old)[0].startswith(
        f"recomputation now repeats the forward collectives of {who}"
    )


def test_gather_that_left_recomputation_is_no_checkpointing():
    """Recomputation still repeats the exchange of tokens, but the experts stay gathered."""
    owner = "layers.1.experts"

    def step(gathered):
        sent = (FORWARD, BACKWARD, Phase.RECOMPUTE)
        rows = [row(phase, owner, "all_to_all", 64, "activations", axis="tp") for phase in sent]
        for phase in gathered:
            rows.append(row(phase, owner, "all_gather", 1_024, "parameters"))
            rows.append(counted("reshard", phase, owner, "unshard"))
        return [*rows, row(BACKWARD, owner, "reduce_scatter", 1_024, "gradients")]

    lines = told(step([FORWARD, Phase.RECOMPUTE]), step([FORWARD]))
    assert not any("recomputation no longer" in line for line in lines)
    assert any("in recompute: all_gather[dp] 1 -> 0" in line for line in lines)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_frozen_unit_is_not_called_unprefetched(is_frozen):
    """Backward may still gather it ahead; it only has no use for it."""

    def step(*kept, ahead):
        gathers = [
            row(phase, "embed", "all_gather", 1_024, "parameters", ahead=distance)
            for phase, distance in ((FORWARD, 0), (BACKWARD, ahead))
        ]
        return [*unit("layers.0"), *gathers, *kept]

    reduced = row(BACKWARD, "embed", "reduce_scatter", 1_024, "gradients")
    lines = told(step(reduced, ahead=1), step(*([] if is_frozen else [reduced]), ahead=0))
    assert any("no longer prefetched" in line for line in lines) is not is_frozen


@pytest.mark.parametrize(("kept", "word"), [(2, "now also reduced"), (1, "now reduced")])
def test_gradients_are_also_reduced_if_nothing_was_lost(kept, word):
    """Of a weight and a bias; the weight may now be reduced to one rank instead."""
    old = [row(OUTSIDE, "q", "all_reduce", 64, "gradients", count=2)]
    new = row(OUTSIDE, "q", "all_reduce", 64, "gradients", count=kept)
    to_owner = row(OUTSIDE, "q", "reduce", 64, "gradients")
    assert any(
        f"gradients of q {word} by reduce[dp]" in line for line in told(old, [new, to_owner])
    )
