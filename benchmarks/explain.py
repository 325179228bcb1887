"""Measure the CPU time of explaining a diff of many layers.

    python benchmarks/explain.py [--layers 126]

The profiles are those of a made-up training step with FSDP and tensor parallelism. Each case
changes the step in one way, in several ways, or at random. Prints the CPU seconds of the
explanation, their ratio to those of the comparison, whether the explanation is exact, and its
steps. The exit status is 1 if an exact explanation takes more than 0.2 CPU seconds for one step, or
more than 0.5 for several.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from figures import keep

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.search import explain
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import CommProfile, Row, Subject, sort_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

_AXES: Final = (
    MeshAxis(name="dp", size=8, dims=((8, 8),)),
    MeshAxis(name="tp", size=8, dims=((8, 1),)),
)
_LIMIT_S: Final = {1: 0.2, 2: 0.5}
"""Limits in CPU seconds, by number of steps; 2 means two or more."""


def _step(
    layers: int, *, name: str = "layers", times: int = 1, batch: int = 1, recomputes: bool = False
) -> CommProfile:
    rows = [*_unit("", 1_000)]
    for number in range(layers):
        layer = f"{name}.{number}"
        rows += _unit(layer, 5_000)
        rows += [
            _counted("reshard", phase, layer, action)
            for phase in (Phase.FORWARD, Phase.BACKWARD)
            for action in ("unshard", "reshard")
        ]
        for part in ("attention", "attention.output", "mlp", "mlp.down"):
            # Sequence parallelism gathers at the start of a part, and scatters at its end.
            for phase in _phases(recomputes=recomputes):
                kind = "all_gather" if "." not in part else "reduce_scatter"
                rows.append(_row(phase, f"{layer}.{part}", kind, "tp", 1_024 * batch))
                change = "(Shard(dim=1))->(Replicate())"
                rows.append(_counted("redistribution", phase, f"{layer}.{part}", change))
    return CommProfile(
        world_size=64,
        mesh_axes=_AXES,
        rows=sort_rows(_repeated(row, times) for row in rows),
    )


def _phases(*, recomputes: bool) -> tuple[Phase, ...]:
    recompute = (Phase.RECOMPUTE,) if recomputes else ()
    return (Phase.FORWARD, *recompute, Phase.BACKWARD)


def _unit(owner: str, nbytes: int) -> Iterator[Row]:
    yield _row(Phase.FORWARD, owner, "all_gather", "dp", nbytes, Role.PARAMETERS)
    if owner:
        yield _row(Phase.BACKWARD, owner, "all_gather", "dp", nbytes, Role.PARAMETERS)
    yield _row(Phase.BACKWARD, owner, "reduce_scatter", "dp", nbytes, Role.GRADIENTS)


def _row(  # noqa: PLR0913, PLR0917  # the fields of a row
    phase: Phase, owner: str, kind: str, axis: str, nbytes: int, role: Role = Role.ACTIVATIONS
) -> Row:
    calls = Calls(nbytes=nbytes, dtype="float32", role=role.value, count=1)
    return Row(phase=phase, owner=owner, what=kind, axis=axis, calls=(calls,))


def _counted(subject: Subject, phase: Phase, owner: str, change: str) -> Row:
    calls = (Calls(count=1),)
    return Row(subject=subject, phase=phase, owner=owner, what=change, calls=calls)


def _repeated(row: Row, times: int) -> Row:
    return replace(
        row, calls=tuple(replace(calls, count=calls.count * times) for calls in row.calls)
    )


def _noise(old: CommProfile, share: float) -> CommProfile:
    # The seed is fixed, so that each run changes the same rows.
    generator = random.Random(1)  # noqa: S311  # not for cryptography
    rows = (
        _repeated(row, generator.randint(2, 3)) if generator.random() < share else row
        for row in old.rows
    )
    return replace(old, rows=tuple(rows))


def main() -> int:
    """Measure each case, and return 1 if one is too slow."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=126)
    layers = parser.parse_args().layers
    old = _step(layers)
    cases = {
        "2 layers more": _step(layers + 2),
        "recomputed": _step(layers, recomputes=True),
        "batch x2, every count x2": _step(layers, times=2, batch=2),
        "renamed, 2 layers more, batch x2": _step(layers + 2, name="blocks", batch=2),
        "1 % of rows at random": _noise(old, 0.01),
        "all rows at random": _noise(old, 1.0),
    }
    print(f"{layers} layers, {len(old.rows)} rows")
    is_slow = False
    for name, new in cases.items():
        started = time.process_time()
        # A failed comparison computes these before it explains the diff.
        _ = old == new, old.totals(), new.totals()
        compared = time.process_time()
        explanation = explain(old, new)
        explained_s = time.process_time() - compared
        steps = [type(step).__name__ for step in explanation.steps]
        print(
            f"{name:34} {explained_s:6.3f} s, {explained_s / (compared - started):6.0f} x totals, "
            f"{'exact' if explanation.is_exact else 'rows left'}: {', '.join(steps) or 'no step'}"
        )
        keep(name, [explained_s / (compared - started)])
        if explanation.is_exact:
            is_slow |= explained_s > _LIMIT_S[min(len(steps), 2)]
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
