"""Build values for reports: steps of FSDP2, and trees of models with any number of layers."""

from dataclasses import replace
from typing import get_args

from pytest_fsdp_comm.comm.events import (
    Beside,
    Collective,
    HostWait,
    Phase,
    Recording,
    Reshard,
    Role,
    Source,
)
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import fold, merge
from pytest_fsdp_comm.reports.explanation import Failure, Severity, Statement
from pytest_fsdp_comm.reports.html.values import Compared, Record, Result, timeline_of
from pytest_fsdp_comm.snapshots.comm_text import format_profile
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.tree.model import (
    AxisPlacement,
    ModuleNode,
    ParameterNode,
    Precision,
    ShardTree,
    ShardUnit,
)

KIB = 1024


def record_step(layers, *, steps=1, name="layers", extra=0, rank=0):
    """Return a recording of FSDP2 steps.

    The root's unit is always gathered. A layer is gathered in its forward, and one layer ahead of
    its backward.
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


def with_overlap(recording):
    """Return a simulated rank's recording: all-gathers in forward are exposed, as the host waits.

    All other collectives have 2 of the modules of layer 0 beside them.
    """
    beside = tuple(Beside(module=f"layers.0.{name}", flops=750_000_000) for name in ("a", "b"))
    collectives = [
        replace(event, exposed=True)
        if (event.kind, event.phase) == ("all_gather", Phase.FORWARD)
        else replace(event, exposed=False, beside=beside)
        for event in recording.collectives
    ]
    # In the middle of each layer's forward.
    waits = [
        HostWait(
            index=event.index,
            way="item",
            owner=event.owner,
            issued_in=event.owner,
            phase=event.phase,
            call_site="model.py:37",
        )
        for event in recording.collectives
        if event.axis == "tp"
    ]
    return replace(
        recording,
        collectives=tuple(collectives),
        host_waits=tuple(waits),
        shows_overlap=True,
    )


def profile_of(*recordings):
    return merge([fold(recording) for recording in recordings])


def failure_of(head="comm_mode differs from a.ws4.comm", **facts):
    """Return a failure; texts are passed by severity, with ``_`` for spaces."""
    names = {name.replace(" ", "_"): name for name in get_args(Severity)}
    statements = [
        Statement(severity=names[name], text=text)
        for name in names.keys() & facts.keys()
        for text in facts.pop(name)
    ]
    defaults = {"compared": "comm_mode", "snapshot": head.rpartition(" ")[2]}
    return Failure(head=head, statements=tuple(statements), **{**defaults, **facts})


def compared(old, new, **changes):
    """Return a comparison of two recordings, which all ranks share."""
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
            "failure": failure_of(
                head="comm_mode differs from snapshots/test_x/test_y.ws4.comm",
                change=("2 layers more",),
                cost=("+63 % bytes in all_gather[dp]",),
                likely=("layers were added",),
                command="pytest --snapshot-update ",
                test="test_x.py",
            ),
            "timelines": (replace(timeline_of(new), ranks=(0, 1, 2, 3)),),
            **changes,
        }
    )


def result(*values, nodeid="tests/test_x.py::test_y[a]", outcome="failed", **changes):
    record = Record(world_size=4, backend="gloo", compared=values)
    return Result(nodeid=nodeid, outcome=outcome, **{"record": record, **changes})


def read(text):
    return SnapshotText(text, where="it").profile


DP = MeshAxis(name="dp", size=4)
SHARD = AxisPlacement(axis="dp", size=4, kind="shard", dim=0, text="Shard(0)")


def unit(module, parameters, **policy):
    defaults = {
        "kind": "fsdp2",
        "is_root": module == 0,
        "shard_axis": DP,
        "replicate_axis": None,
        "reshard_after_forward": module != 0,
        "precision": Precision(param_dtype="bfloat16"),
        "offload": False,
        "nbytes_gathered": 2048,
        "nbytes_padding": 0,
        "nbytes_kept": 1024,
    }
    return ShardUnit(modules=(module,), parameters=parameters, **{**defaults, **policy})


def parameter(module, name, **facts):
    defaults = {"shape": (16, 64), "dtype": "float32", "itemsize": 4, "placements": (SHARD,)}
    defaults |= {"local_numel": 256, "trainable": True, "device": "cpu", "unit": module}
    return ParameterNode(module=module, name=name, **{**defaults, **facts})


def stack(blocks=32, odd=None):
    """Return the tree of a stack of blocks; block `odd` does not reshard after forward."""
    modules = [
        ModuleNode(name="", parent=None, depth=0, class_name="Model"),
        ModuleNode(name="layers", parent=0, depth=1, class_name="ModuleList"),
    ]
    parameters = [parameter(0, "scale", placements=(), unit=None, shape=(2,), local_numel=2)]
    units = [unit(0, ())]
    for block in range(blocks):
        index = len(modules)
        modules += [
            ModuleNode(name=str(block), parent=1, depth=2, class_name="Block"),
            ModuleNode(name="up", parent=index, depth=3, class_name="Linear"),
        ]
        parameters.append(parameter(index + 1, "weight", unit=len(units)))
        policy = {"reshard_after_forward": False} if block == odd else {}
        units.append(unit(index, (len(parameters) - 1,), **policy))
    return ShardTree(
        rank=0,
        world_size=4,
        backend="gloo",
        torch_version="2.13.0",
        mesh_axes=(DP,),
        modules=tuple(modules),
        parameters=tuple(parameters),
        units=tuple(units),
    )
