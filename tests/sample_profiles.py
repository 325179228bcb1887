"""Made-up profiles, and changes of them that are planted."""

from dataclasses import replace
from fractions import Fraction

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import SUBJECTS, CommProfile, Row, sort_rows

FORWARD, BACKWARD, RECOMPUTE = Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE
DP = MeshAxis(name="dp", size=4, dims=((4, 2),))
TP = MeshAxis(name="tp", size=2, dims=((2, 1),))
REPLICATE = MeshAxis(name="replicate", size=2, dims=((2, 4),))
SHARD = MeshAxis(name="shard", size=4, dims=((4, 1),))
WORLD = MeshAxis(name="world", size=8, dims=((8, 1),))
NBYTES = 5_120
WHOLE = "(Shard(dim=1))->(Replicate())"


def row(phase, owner, kind, nbytes, role="", *, axis="dp", dtype="float32", count=1, ahead=0):
    calls = Calls(nbytes=nbytes, dtype=dtype, role=role, count=count, ahead=ahead)
    return Row(phase=phase, owner=owner, what=kind, axis=axis, calls=(calls,))


def counted(subject, phase, owner, what, count=1):
    return Row(subject=subject, phase=phase, owner=owner, what=what, calls=(Calls(count=count),))


def unit(owner, nbytes=NBYTES, *, kept=False):
    """The rows of an FSDP unit in a step."""
    rows = [row(FORWARD, owner, "all_gather", nbytes, "parameters")]
    if not kept:
        rows.append(row(BACKWARD, owner, "all_gather", nbytes, "parameters", ahead=1))
    rows.append(row(BACKWARD, owner, "reduce_scatter", nbytes, "gradients"))
    acts = [(FORWARD, "unshard"), (BACKWARD, "reshard")]
    acts += [] if kept else [(FORWARD, "reshard"), (BACKWARD, "unshard")]
    return rows + [counted("reshard", at, owner, act) for at, act in acts]


def split(owner, nbytes=1_024):
    """The rows of a module under tensor parallelism."""
    rows = [
        row(FORWARD, owner, "all_gather", nbytes, "activations", axis="tp"),
        row(BACKWARD, owner, "reduce_scatter", nbytes, "activations", axis="tp"),
    ]
    return [*rows, counted("redistribution", FORWARD, owner, WHOLE)]


def profile(layers=3, *, tensor_parallel=False, name="layers", extra=()):
    rows = unit("", kept=True)
    for number in range(layers):
        rows += unit(f"{name}.{number}", 2 * NBYTES)
        if tensor_parallel:
            rows += split(f"{name}.{number}.mlp")
    for more in extra:
        rows += more
    return made(rows)


def made(rows):
    used = {one.axis for one in rows}
    return CommProfile(
        world_size=8,
        mesh_axes=tuple(axis for axis in (DP, TP, REPLICATE, SHARD, WORLD) if axis.name in used),
        rows=sort_rows(rows),
    )


def changed(old, change, subjects=SUBJECTS):
    """A profile with each row of some subjects changed, or left out where the change gives None."""
    rows = (change(one) if one.subject in subjects else one for one in old.rows)
    return made([one for one in rows if one is not None])


def times(one, factor):
    """A row that happens several times as often."""
    calls = tuple(replace(calls, count=calls.count * factor) for calls in one.calls)
    return replace(one, calls=calls)


def sized(one, factor):
    return replace(
        one, calls=tuple(replace(calls, nbytes=int(calls.nbytes * factor)) for calls in one.calls)
    )


def typed(one, dtype):
    return replace(one, calls=tuple(replace(calls, dtype=dtype) for calls in one.calls))


def role(one):
    return one.calls[0].role


# Each turns a profile into another one.


def more_layers(old):
    names = [one.owner for one in old.rows if one.owner and one.owner.startswith("layers.")]
    count = 1 + max(int(name.split(".")[1]) for name in names)
    last = [one for one in old.rows if (one.owner or "").startswith(f"layers.{count - 1}")]
    new = [replace(one, owner=one.owner.replace(f".{count - 1}", f".{count}")) for one in last]
    return made([*old.rows, *new])


def renamed(old):
    return changed(
        old, lambda one: replace(one, owner=(one.owner or "").replace("layers.", "blocks."))
    )


def twice(old):
    return changed(old, lambda one: times(one, 2))


def accumulated(old):
    return changed(old, lambda one: one if role(one) == "gradients" else times(one, 4))


def larger_batch(old):
    return changed(old, lambda one: sized(one, 3) if role(one) == "activations" else one)


def in_bfloat16(old):
    def change(one):
        return typed(sized(one, Fraction(1, 2)), "bfloat16")

    return changed(old, change, ["collective"])


def kept(old):
    gone = {(FORWARD, "reshard"), (BACKWARD, "unshard")}

    def change(one):
        is_gather = one.what == "all_gather" and role(one) == "parameters"
        is_gone = is_gather and one.phase is BACKWARD
        return None if is_gone or (one.phase, one.what) in gone else one

    return changed(old, change)


def reduced_often(old):
    return changed(old, lambda one: times(one, 4) if role(one) == "gradients" else one)


def frozen(old):
    gone = {one.owner for one in old.rows if (one.owner or "").endswith(".1")}
    return changed(old, lambda one: None if one.owner in gone and role(one) == "gradients" else one)


def recomputed(old):
    again = [
        replace(one, phase=RECOMPUTE)
        for one in old.rows
        if one.phase is FORWARD and role(one) == "activations"
    ]
    return made([*old.rows, *again])


def evaluated(old):
    def change(one):
        is_kept = one.owner == "" and (one.subject == "reshard" or role(one))
        return times(one, 2) if one.phase is FORWARD and not is_kept else one

    return changed(old, change)
