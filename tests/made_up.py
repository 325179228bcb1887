"""Made-up profiles, and changes of them that are planted."""

from dataclasses import replace
from fractions import Fraction

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


# Each turns a profile into another one.


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
