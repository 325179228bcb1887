"""Measure how much longer a comparison takes because ranks compare their calls.

    python benchmarks/divergence.py [--layers 32] [--turns 7]

The ranks record a training step with FSDP and tensor parallelism; they are equal, or belong to two
pipeline stages. ``4 ranks`` is a comparison on one of 4 ranks: fold the recording, exchange it with
the other ranks, merge all, and write the snapshot. ``64 recordings`` reads a JSON file, as
``fsdp-comm diff`` does, and merges it. Prints the CPU milliseconds without and with the comparison
of calls, and their ratio; both are measured in the same run.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from figures import keep

from pytest_fsdp_comm.comm.divergence import find_divergence, find_divergence_of, list_calls
from pytest_fsdp_comm.comm.events import Collective, Phase, Recording, Role, Source
from pytest_fsdp_comm.comm.json import (
    dump_recordings,
    join_recordings,
    load_recordings,
    make_sharing_key,
)
from pytest_fsdp_comm.comm.mesh import axis_of
from pytest_fsdp_comm.comm.profile import fold, merge
from pytest_fsdp_comm.gathering import gather_values
from pytest_fsdp_comm.snapshots.comm_text import format_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TP = 2


def main() -> None:
    """Measure all cases, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    print(f"{'CPU ms':28} without     with    ratio")
    for stages in (1, 2):
        cases = {
            "4 ranks": _prepare_comparison(_record(4, stages, options.layers)),
            "64 recordings": _prepare_merge(_record(64, stages, options.layers)),
        }
        for name, run in cases.items():
            turns = [(_time(run, compares=False), _time(run, compares=True))
                     for _ in range(options.turns)]  # fmt: skip
            before, after = (min(times) for times in zip(*turns, strict=True))
            label = f"{name}, {stages} stage{'s' * (stages > 1)}"
            print(f"{label:28}{before:8.1f} {after:8.1f} {after / before:8.2f}", flush=True)
            keep(label, [after / before])


def _time(run: Callable[[bool], None], *, compares: bool) -> float:
    started = time.process_time()
    run(compares)
    return (time.process_time() - started) * 1e3


def _prepare_comparison(recordings: Sequence[Recording]) -> Callable[[bool], None]:
    """Return a function that does the work of rank 0; the other ranks have already sent theirs."""
    ranks = range(len(recordings))
    profiles = [_text(replace(fold(recording), recorded_ranks=())) for recording in recordings]
    calls_of_ranks = [list_calls(recording) for recording in recordings]
    calls_texts = [_text(calls) for calls in calls_of_ranks]
    digests = [calls.digest for calls in calls_of_ranks]

    def run(compares: bool) -> None:
        profile = replace(fold(recordings[0]), recorded_ranks=())
        merged = merge(gather_values(lambda own: [own, *profiles[1:]], "", profile), ranks=ranks)
        if compares:
            calls = list_calls(recordings[0])
            if {calls.digest, *digests[1:]} != {digests[0]}:
                gathered = gather_values(lambda own: [own, *calls_texts[1:]], "", calls)
                assert find_divergence(dict(zip(ranks, gathered, strict=True))) is None
        format_profile(merged)

    return run


def _prepare_merge(recordings: Sequence[Recording]) -> Callable[[bool], None]:
    """Return a function that reads and merges a file of recordings."""
    texts = {rank: dump_recordings([replace(of_rank, rank=0)])
             for rank, of_rank in enumerate(recordings)}  # fmt: skip
    text = join_recordings(texts)

    def run(compares: bool) -> None:
        loaded = load_recordings(text)
        profiles = {make_sharing_key(recording): fold(recording) for recording in loaded}
        merge([profiles[make_sharing_key(recording)] for recording in loaded])
        if compares:
            assert find_divergence_of(loaded) is None

    return run


def _text(value: object) -> str:
    """Return the text that a rank sends for a value."""
    texts: list[str] = []

    def gather(text: str) -> list[str]:
        texts.append(text)
        return []

    gather_values(gather, "", value)
    return texts[0]


def _record(num_ranks: int, stages: int, layers: int) -> list[Recording]:
    """Return the recordings of all ranks; each stage has its own groups."""
    axes = (axis_of("dp", range(0, num_ranks // stages, TP)), axis_of("tp", range(TP)))
    recordings = []
    for rank in range(num_ranks):
        stage = rank * stages // num_ranks
        names = [f"layers.{stage * layers + number}" for number in range(layers)]
        forward = [event for name in names for event in _layer(name, Phase.FORWARD)]
        backward = [event for name in reversed(names) for event in _layer(name, Phase.BACKWARD)]
        recordings.append(
            Recording(
                rank=rank,
                world_size=num_ranks,
                backend="nccl",
                torch_version="2.13.0",
                mesh_axes=axes,
                collectives=(*forward, *backward),
            )
        )
    return recordings


def _layer(name: str, phase: Phase) -> list[Collective]:
    events = [_collective("all_gather", name, phase, Source.FSDP, Role.PARAMETERS)]
    events += [
        _collective("all_reduce", f"{name}.{part}", phase, Source.DTENSOR, Role.ACTIVATIONS)
        for part in ("attention", "mlp")
    ]
    if phase is Phase.BACKWARD:
        events.append(_collective("reduce_scatter", name, phase, Source.FSDP, Role.GRADIENTS))
    return events


def _collective(kind: str, owner: str, phase: Phase, source: Source, role: Role) -> Collective:
    return Collective(
        index=0,
        kind=kind,
        op="c10d._op_",
        owner=owner,
        issued_in=owner,
        phase=phase,
        axis="tp" if source is Source.DTENSOR else "dp",
        group_size=2,
        dtype="bfloat16",
        nbytes_sent=1 << 20,
        nbytes_received=1 << 20,
        source=source,
        call_site="project/src/train/step.py:123",
        role=role,
    )


if __name__ == "__main__":
    main()
