"""Build values for reports: steps of FSDP2, and trees of models with any number of layers."""

from dataclasses import replace

from pytest_fsdp_comm.comm.events import Collective, Phase, Recording, Reshard, Role, Source
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import fold, merge
from pytest_fsdp_comm.reports.explanation import FailureText
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


def profile_of(*recordings):
    return merge([fold(recording) for recording in recordings])


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
            "text": FailureText(
                head="comm_mode differs from snapshots/test_x/test_y.ws4.comm",
                cost=("+63 % bytes in all_gather[dp]",),
                causes=("layers were added",),
            ),
            "accept": "pytest --snapshot-update",
            "headline": "2 layers more",
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
