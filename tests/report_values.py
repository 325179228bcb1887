"""Values for reports, by hand: what FSDP2 does in steps of models of any number of layers."""

from dataclasses import replace

from pytest_fsdp_comm.comm.events import Collective, Phase, Recording, Reshard, Role, Source
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import fold, merge
from pytest_fsdp_comm.reports.html.timeline import timeline_of
from pytest_fsdp_comm.reports.html.values import Compared, RankTimeline, Record, Result
from pytest_fsdp_comm.snapshots.comm_text import format_profile
from pytest_fsdp_comm.snapshots.documents import SnapshotText

KIB = 1024


def record_step(layers, *, steps=1, name="layers", extra=0, rank=0):
    """What FSDP2 does in steps of so many layers, as a recording.

    The root's unit is gathered throughout; each layer's in its forward, and one ahead in backward.
    """
    collectives, reshards = [], []
    index = 0

    def send(kind, owner, phase, nbytes, axis="dp"):
        nonlocal index
        collectives.append(
            Collective(
                index=index,
                kind=kind,
                op="c10d",
                owner=owner,
                issued_in=owner,
                phase=phase,
                axis=axis,
                group_size=4,
                dtype="float32",
                nbytes_sent=nbytes // 4,
                nbytes_received=nbytes,
                source=Source.FSDP,
                call_site="train.py:7",
                role=Role.PARAMETERS if kind == "all_gather" else Role.GRADIENTS,
            )
        )
        index += 1

    def gather(action, owner, phase, nbytes):
        nonlocal index
        reshards.append(
            Reshard(
                index=index,
                action=action,
                module=owner,
                issued_in=owner,
                phase=phase,
                nbytes=nbytes,
            )
        )
        index += 1
        if action == "unshard":
            send("all_gather", owner, phase, nbytes)

    for _ in range(steps):
        gather("unshard", "", Phase.FORWARD, 8 * KIB)
        for layer in range(layers):
            owner = f"{name}.{layer}"
            gather("unshard", owner, Phase.FORWARD, 4 * KIB)
            send("all_reduce", owner, Phase.FORWARD, 512, axis="tp")
            gather("reshard", owner, Phase.FORWARD, 4 * KIB)
        for _ in range(extra):
            send("all_reduce", None, Phase.FORWARD, 4, axis="dp")
        gather("unshard", f"{name}.{layers - 1}", Phase.BACKWARD, 4 * KIB)
        for layer in reversed(range(layers)):
            owner = f"{name}.{layer}"
            if layer:
                gather("unshard", f"{name}.{layer - 1}", Phase.BACKWARD, 4 * KIB)
            gather("reshard", owner, Phase.BACKWARD, 4 * KIB)
            send("reduce_scatter", owner, Phase.BACKWARD, 4 * KIB)
        gather("reshard", "", Phase.BACKWARD, 8 * KIB)
    return Recording(
        rank=rank,
        world_size=4,
        backend="gloo",
        torch_version="2.13.0",
        mesh_axes=(
            MeshAxis(name="dp", size=4, dims=((4, 1),)),
            MeshAxis(name="tp", size=4, dims=((4, 1),)),
        ),
        collectives=tuple(collectives),
        reshards=tuple(reshards),
        peak_gathered_nbytes=16 * KIB if layers > 1 else 12 * KIB,
    )


def profile_of(*recordings):
    return merge([fold(recording) for recording in recordings])


def compared(old, new, **changes):
    """A comparison of one rank's recordings, all ranks alike."""
    ranks = [replace(new, rank=rank) for rank in range(4)]
    before = [replace(old, rank=rank) for rank in range(4)]
    return Compared(
        **{
            "name": "comm",
            "kind": "comm",
            "verdict": "differs",
            "file": "snapshots/test_x/test_y.ws4.comm",
            "old": format_profile(profile_of(*before)),
            "new": format_profile(profile_of(*ranks)),
            "lines": (
                "comm_mode differs from snapshots/test_x/test_y.ws4.comm",
                "  +63 % bytes in all_gather[dp]",
                "  likely: layers were added",
                "  accept: pytest --snapshot-update",
            ),
            "headline": "2 layers more",
            "timelines": (RankTimeline(ranks=(0, 1, 2, 3), timeline=timeline_of(new)),),
            **changes,
        }
    )


def result(*values, nodeid="tests/test_x.py::test_y[a]", outcome="failed", **changes):
    record = Record(world_size=4, backend="gloo", compared=values)
    return Result(nodeid=nodeid, outcome=outcome, **{"record": record, **changes})


def read(text):
    return SnapshotText(text, where="it").profile
