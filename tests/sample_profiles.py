"""Build profiles, and functions that change them in known ways."""

from dataclasses import replace
from fractions import Fraction

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.evidence import Recordings
from pytest_fsdp_comm.comm.explanation.search import explain
from pytest_fsdp_comm.comm.explanation.steps import rename_rows
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


def counted(subject, phase, owner, label, count=1):
    return Row(subject=subject, phase=phase, owner=owner, what=label, calls=(Calls(count=count),))


def unit(owner, nbytes=NBYTES, *, kept=False):
    """Return the rows of an FSDP unit in a step."""
    rows = [row(FORWARD, owner, "all_gather", nbytes, "parameters")]
    if not kept:
        rows.append(row(BACKWARD, owner, "all_gather", nbytes, "parameters", ahead=1))
    rows.append(row(BACKWARD, owner, "reduce_scatter", nbytes, "gradients"))
    acts = [(FORWARD, "unshard"), (BACKWARD, "reshard")]
    acts += [] if kept else [(FORWARD, "reshard"), (BACKWARD, "unshard")]
    return rows + [counted("reshard", at, owner, act) for at, act in acts]


def split(owner, nbytes=1_024):
    """Return the rows of a module under tensor parallelism."""
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
    used = {entry.axis for entry in rows}
    return CommProfile(
        world_size=8,
        mesh_axes=tuple(axis for axis in (DP, TP, REPLICATE, SHARD, WORLD) if axis.name in used),
        rows=sort_rows(rows),
    )


def changed(old, change, subjects=SUBJECTS):
    """Apply a function to each row of some subjects; drop rows for which it returns None."""
    rows = (change(entry) if entry.subject in subjects else entry for entry in old.rows)
    return made([entry for entry in rows if entry is not None])


def times(entry, factor):
    """Multiply the counts of a row."""
    calls = tuple(replace(calls, count=calls.count * factor) for calls in entry.calls)
    return replace(entry, calls=calls)


def sized(entry, factor):
    return replace(
        entry,
        calls=tuple(replace(calls, nbytes=int(calls.nbytes * factor)) for calls in entry.calls),
    )


def typed(entry, dtype):
    return replace(entry, calls=tuple(replace(calls, dtype=dtype) for calls in entry.calls))


def role(entry):
    return entry.calls[0].role


# Each function returns a changed profile.


def more_layers(old):
    names = [entry.owner for entry in old.rows if entry.owner and entry.owner.startswith("layers.")]
    count = 1 + max(int(name.split(".")[1]) for name in names)
    last = [entry for entry in old.rows if (entry.owner or "").startswith(f"layers.{count - 1}")]
    new = [
        replace(entry, owner=entry.owner.replace(f".{count - 1}", f".{count}")) for entry in last
    ]
    return made([*old.rows, *new])


def renamed(old):
    return changed(
        old, lambda entry: replace(entry, owner=(entry.owner or "").replace("layers.", "blocks."))
    )


def twice(old):
    return changed(old, lambda entry: times(entry, 2))


def accumulated(old):
    return changed(old, lambda entry: entry if role(entry) == "gradients" else times(entry, 4))


def larger_batch(old):
    return changed(old, lambda entry: sized(entry, 3) if role(entry) == "activations" else entry)


def in_bfloat16(old):
    def change(entry):
        return typed(sized(entry, Fraction(1, 2)), "bfloat16")

    return changed(old, change, ["collective"])


def kept(old):
    removed = {(FORWARD, "reshard"), (BACKWARD, "unshard")}

    def change(entry):
        is_gather = entry.what == "all_gather" and role(entry) == "parameters"
        is_removed = is_gather and entry.phase is BACKWARD
        return None if is_removed or (entry.phase, entry.what) in removed else entry

    return changed(old, change)


def reduced_often(old):
    return changed(old, lambda entry: times(entry, 4) if role(entry) == "gradients" else entry)


def frozen(old):
    removed = {entry.owner for entry in old.rows if (entry.owner or "").endswith(".1")}
    return changed(
        old, lambda entry: None if entry.owner in removed and role(entry) == "gradients" else entry
    )


def recomputed(old):
    again = [
        replace(entry, phase=RECOMPUTE)
        for entry in old.rows
        if entry.phase is FORWARD and role(entry) == "activations"
    ]
    return made([*old.rows, *again])


def evaluated(old):
    def change(entry):
        is_kept = entry.owner == "" and (entry.subject == "reshard" or role(entry))
        return times(entry, 2) if entry.phase is FORWARD and not is_kept else entry

    return changed(old, change)


def describe_steps(old, new):
    """Return the sentence of each step between two profiles."""
    steps = explain(old, new).steps
    recordings = Recordings(old=old, renamed=rename_rows(old, steps), new=new)
    return [step.describe(recordings) for step in steps]
