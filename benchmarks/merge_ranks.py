"""Measure how long a rank takes to merge the profiles of all ranks and to compare the result.

    python benchmarks/merge_ranks.py [--ranks 4096] [--layers 32]

The profiles are those of a training step with FSDP and 8-way tensor parallelism. The other ranks
have already written theirs to files. The measured rank reads these, merges them, writes the
snapshot, reads it again, compares the two, and restricts the snapshot to some ranks. The ranks are
identical, or belong to two or eight pipeline stages (in one case, the first rank of each tp group
sends an extra broadcast), or all differ. Each case runs in a separate process. Prints the CPU
seconds of each of these steps, the peak memory in MiB beyond that of importing torch, the size of
the snapshot, and the ratio to the line above, which has half as many ranks. The exit status is 1 if
a case other than the last takes more than 3 CPU seconds or 50 MiB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from figures import keep
from torch.distributed import FileStore  # type: ignore[attr-defined]  # documented

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import (
    Collective,
    Phase,
    Recording,
    Redistribution,
    Reshard,
    Role,
    Source,
)
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import CommProfile, fold, merge, restrict
from pytest_fsdp_comm.gathering import Exchange, TextStore, gather_values
from pytest_fsdp_comm.snapshots.comm_text import format_profile, read_comm
from pytest_fsdp_comm.snapshots.lines import SnapshotLines

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 3.0
LIMIT_MIB = 50.0

LABEL = "comm_mode"
TP = 8
STEPS = ("exchange", "merge", "write", "read", "compare", "to 1 rank", "to 64")
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How the ranks differ."""

    stages: int = 1
    broadcasts_on_first_of_tp: bool = False
    is_each_different: bool = False


CASES = {
    "identical ranks": Case(),
    "2 stages": Case(stages=2),
    "8 stages, extra broadcasts": Case(stages=8, broadcasts_on_first_of_tp=True),
    "all ranks different": Case(is_each_different=True),
}


def main() -> int:
    """Measure all cases, and return 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(_measure(CASES[options.case], options.ranks, options.layers)))
        return 0
    print(f"{options.layers} layers; CPU seconds of one rank")
    print(
        f"{'':26}{'ranks':>6}", *(f"{step:>9}" for step in STEPS), "      all  MiB  snapshot ratio"
    )
    is_over = False
    for name, case in CASES.items():
        # If all ranks differ, the text of each is in memory, so measure only half as many.
        max_ranks = options.ranks // 2 if case.is_each_different else options.ranks
        before = 0.0
        for num_ranks in (max_ranks // 4, max_ranks // 2, max_ranks):
            arguments = ("--ranks", num_ranks, "--layers", options.layers, "--case", name)
            command = [sys.executable, __file__, *map(str, arguments)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds, mib, size = json.loads(done.stdout)
            # The two restrictions do not count: only runs with fewer ranks need them.
            total = sum(seconds[:5])
            ratio = f"{total / before:5.2f}" if before else ""
            print(
                f"{name:26}{num_ranks:6}",
                *(f"{step:9.3f}" for step in seconds),
                f"{total:9.2f} {mib:4.0f} {size:7} B {ratio}",
                flush=True,
            )
            if before:
                keep(f"{name}, {num_ranks} ranks", [total / before])
            before = total
            is_over |= not case.is_each_different and (total > LIMIT_S or mib > LIMIT_MIB)
    return int(is_over)


def _measure(case: Case, num_ranks: int, layers: int) -> tuple[list[float], float, int]:
    """Return the CPU seconds of each of `STEPS`, the memory in MiB, and the snapshot's size."""
    ranks = tuple(range(num_ranks))
    imports_mib = _peak_mib()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)

        def exchange() -> Exchange:
            return Exchange(TextStore(FileStore(str(directory / "store"), -1)), 0, ranks)

        child = os.fork()
        if not child:
            # Use a child, so that the memory of these profiles does not count.
            store, digests = TextStore(FileStore(str(directory / "store"), -1)), set()
            for rank in ranks[1:]:
                text = _text(_profile(case, rank, num_ranks, layers))
                digest = hashlib.sha256(text.encode()).hexdigest()
                if digest not in digests:
                    store.put(f"1.text.{rank}", text)
                digests.add(digest)
                store.put(f"1.{rank}", digest)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit("the other ranks failed")
        profile = _profile(case, 0, num_ranks, layers)
        steps: list[float] = []

        def timed(step: Callable[[], object]) -> None:
            started = time.process_time()
            step()
            steps.append(time.process_time() - started)

        gathered: list[CommProfile] = []
        merged: list[CommProfile] = []
        texts: list[str] = []
        timed(lambda: gathered.extend(gather_values(exchange(), LABEL, profile)))
        timed(lambda: merged.append(merge(gathered, ranks=ranks)))
        timed(lambda: texts.append(format_profile(merged[0])))
        timed(lambda: merged.append(read_comm(SnapshotLines(texts[0], where=""))))
        new, old = merged
        timed(lambda: _check(old, new))
        timed(lambda: restrict(old, (0,)))
        timed(lambda: restrict(old, ranks[:: num_ranks // 64]))
    return steps, _peak_mib() - imports_mib, len(texts[0])


_texts: dict[int, tuple[CommProfile, str]] = {}


def _text(profile: CommProfile) -> str:
    """Return the text that a rank sends for its profile, cached by profile."""
    if id(profile) not in _texts:

        def keep(text: str) -> list[str]:
            _texts[id(profile)] = (profile, text)
            return []

        gather_values(keep, LABEL, profile)
    return _texts[id(profile)][1]


def _check(old: CommProfile, new: CommProfile) -> None:
    assert not compare(old, new).changes


def _peak_mib() -> float:
    # Not ru_maxrss: it starts with the value of the parent process.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (kib,) = re.findall(r"VmHWM:\s*([0-9]+) kB", status)
    return int(kib) / 1024


def _profile(case: Case, rank: int, num_ranks: int, layers: int) -> CommProfile:
    stage = rank * case.stages // num_ranks
    broadcasts = case.broadcasts_on_first_of_tp and rank % TP == 0
    profile = _stage(stage, layers // case.stages, num_ranks, broadcasts=broadcasts)
    if not case.is_each_different:
        return profile
    first, *rows = profile.rows
    (calls,) = first.calls
    return replace(profile, rows=(replace(first, calls=(replace(calls, nbytes=rank + 1),)), *rows))


@cache
def _stage(stage: int, layers: int, num_ranks: int, *, broadcasts: bool) -> CommProfile:
    dp = num_ranks // TP
    names = [f"layers.{number}" for number in range(stage * layers, (stage + 1) * layers)]
    blocks = [f"{name}.{part}" for name in names for part in ("attention", "mlp")]
    units = ["", *names] if stage == 0 else names
    collectives = [
        *(_fsdp("all_gather", unit, FORWARD, Role.PARAMETERS) for unit in units),
        *(_fsdp("all_gather", unit, BACKWARD, Role.PARAMETERS) for unit in units),
        *(_fsdp("reduce_scatter", unit, BACKWARD, Role.GRADIENTS) for unit in units),
        *(_collective("all_reduce", owner, phase, Source.DTENSOR, Role.ACTIVATIONS)
          for owner in blocks for phase in (FORWARD, BACKWARD)),
    ]  # fmt: skip
    if broadcasts:
        collectives.append(_collective("broadcast", None, Phase.OUTSIDE, Source.USER))
    recording = Recording(
        rank=0,
        world_size=num_ranks,
        backend="nccl",
        torch_version="2.13.0",
        mesh_axes=(
            MeshAxis(name="dp", size=dp, dims=((dp, TP),)),
            MeshAxis(name="tp", size=TP, dims=((TP, 1),)),
        ),
        collectives=tuple(collectives),
        reshards=tuple(
            Reshard(index=0, action=action, module=unit, issued_in=unit, phase=phase, nbytes=1)
            for unit in units
            for phase in (FORWARD, BACKWARD)
            for action in ("unshard", "reshard")
        ),
        redistributions=tuple(
            Redistribution(
                index=0,
                owner=owner,
                issued_in=owner,
                phase=phase,
                source_placements=("Partial(sum)",),
                target_placements=("Replicate()",),
                mesh_axes=("tp",),
                is_explicit=False,
                nbytes=1,
                call_site="train.py:1",
            )
            for owner in blocks
            for phase in (FORWARD, BACKWARD)
        ),
        peak_gathered_nbytes=1 << 30,
    )
    # `CommMode` sends a profile without its rank, since the receiver knows who sent it.
    return replace(fold(recording), recorded_ranks=())


def _fsdp(kind: str, owner: str, phase: Phase, role: Role) -> Collective:
    return _collective(kind, owner, phase, Source.FSDP, role)


def _collective(
    kind: str, owner: str | None, phase: Phase, source: Source, role: Role | None = None
) -> Collective:
    return Collective(
        index=0,
        kind=kind,
        op="c10d._op_",
        owner=owner,
        issued_in=owner,
        phase=phase,
        axis="tp" if source is Source.DTENSOR else "dp",
        group_size=TP,
        dtype="bfloat16",
        nbytes_sent=1 << 20,
        nbytes_received=1 << 20,
        source=source,
        call_site="project/src/train/step.py:123",
        role=role,
        root_rank=0 if kind == "broadcast" else None,
    )


if __name__ == "__main__":
    sys.exit(main())
