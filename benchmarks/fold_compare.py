"""What folding and comparing a long recording costs.

    python benchmarks/fold_compare.py [--events 100000]

Also shows the ratio to one pass of ``collections.Counter`` over the events, which is the least that
counting them can take, and to writing them as JSON.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Collective, Phase, Recording, Source
from pytest_fsdp_comm.comm.json import dump_recording
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import fold, merge
from pytest_fsdp_comm.snapshots.comm_reading import read_comm
from pytest_fsdp_comm.snapshots.comm_text import format_profile
from pytest_fsdp_comm.snapshots.lines import SnapshotLines

KINDS = ("all_gather", "reduce_scatter")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    count = parser.parse_args().events
    recording = _recording(count)
    started = time.perf_counter()
    dump_recording(recording)
    as_json = time.perf_counter() - started
    started = time.perf_counter()
    Counter((event.phase, event.owner, event.kind, event.axis) for event in recording.collectives)
    counted = time.perf_counter() - started
    started = time.perf_counter()
    profile = merge([fold(recording)])
    folded = time.perf_counter()
    old = read_comm(SnapshotLines(format_profile(profile), where=""))
    written = time.perf_counter()
    comparison = compare(old, profile)
    compared = time.perf_counter()
    assert not comparison.changes
    print(f"{count} events of {len(profile.rows)} rows")
    for name, seconds in (
        ("one Counter", counted),
        ("as JSON", as_json),
        ("fold and merge", folded - started),
        ("write and read", written - folded),
        ("compare", compared - written),
        ("fold to compared", compared - started),
    ):
        print(
            f"{name:18} {seconds:7.3f} s {seconds / counted:7.2f} x Counter "
            f"{seconds / as_json:6.2f} x JSON"
        )


def _recording(count: int) -> Recording:
    modules = [f"layers.{number}.experts.{expert}" for number in range(80) for expert in range(8)]
    return Recording(
        rank=0,
        world_size=4096,
        backend="fake",
        torch_version="2.13.0",
        mesh_axes=(MeshAxis(name="dp", size=4096),),
        collectives=tuple(
            Collective(
                index=index,
                kind=KINDS[index % 2],
                op="c10d._allgather_base_",
                owner=modules[index // 2 % len(modules)],
                issued_in=modules[index // 3 % len(modules)],
                phase=Phase.FORWARD if index % 3 else Phase.BACKWARD,
                axis="dp",
                group_size=4096,
                dtype="bfloat16",
                nbytes_sent=1024,
                nbytes_received=4096 * 1024,
                source=Source.FSDP,
                call_site="train.py:1",
            )
            for index in range(count)
        ),
    )


if __name__ == "__main__":
    main()
