"""Measure the time of folding and comparing a long recording.

    python benchmarks/fold_compare.py [--events 100000]

Prints ratios to one pass of ``collections.Counter`` over the events, which is the least that
counting them can take, and to writing them as JSON. Then prints the CPU seconds of a comparison
that passes, for 126 layers with 64 experts each. Such a comparison parses neither of the two texts,
because they are equal.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

from figures import keep

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Collective, Phase, Recording, Role, Source
from pytest_fsdp_comm.comm.json import dump_recordings
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import CommProfile, Row, fold, merge, sort_rows
from pytest_fsdp_comm.snapshots.comm_text import format_profile, read_comm
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.snapshots.lines import SnapshotLines

KINDS = ("all_gather", "reduce_scatter")


def main() -> None:
    """Measure both recordings, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    count = parser.parse_args().events
    recording = _recording(count)
    started = time.perf_counter()
    dump_recordings([recording])
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
        if name != "one Counter":
            keep(name, [seconds / counted])
    _pass(_profile_of_experts())


def _pass(profile: CommProfile) -> None:
    stored = format_profile(profile)
    started = time.process_time()
    new = SnapshotText.from_profile(profile, where="recorded")
    written = time.process_time()
    # This compares only the texts.
    assert SnapshotText(stored, where="stored") == new
    compared = time.process_time()
    # A comparison that passes does not do this: it parses the text.
    assert SnapshotText(stored, where="stored").profile == profile
    print(f"{len(profile.rows)} rows of experts in {stored.count(chr(10))} lines")
    for name, seconds in (
        ("write", written - started),
        ("compare", compared - written),
        ("read (not needed)", time.process_time() - compared),
    ):
        print(f"{name:18} {seconds:9.5f} CPU s")
        keep(f"CPU seconds, 126 layers with 64 experts: {name}", [seconds])


def _profile_of_experts() -> CommProfile:
    def row(phase: Phase, owner: str, kind: str, role: Role) -> Row:
        calls = Calls(nbytes=1_024, dtype="bfloat16", role=role.value, count=1)
        return Row(phase=phase, owner=owner, what=kind, axis="dp", calls=(calls,))

    owners = [f"layers.{layer}" for layer in range(126)]
    owners += [f"{layer}.experts.{expert}" for layer in owners for expert in range(64)]
    return CommProfile(
        world_size=8,
        mesh_axes=(MeshAxis(name="dp", size=8, dims=((8, 1),)),),
        rows=sort_rows(
            row(phase, owner, kind, role)
            for owner in owners
            for phase, kind, role in (
                (Phase.FORWARD, "all_gather", Role.PARAMETERS),
                (Phase.BACKWARD, "all_gather", Role.PARAMETERS),
                (Phase.BACKWARD, "reduce_scatter", Role.GRADIENTS),
            )
        ),
    )


def _recording(count: int) -> Recording:
    modules = [f"layers.{number}.experts.{expert}" for number in range(80) for expert in range(8)]
    return Recording(
        rank=0,
        world_size=4096,
        backend="fake",
        torch_version="2.13.0",
        mesh_axes=(MeshAxis(name="dp", size=4096, dims=((4096, 1),)),),
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
