"""Immutable records of the communication of one rank, in the order of issue."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from pytest_fsdp_comm.comm.mesh import MeshAxis

ROOT_FQN: Final = ""
"""The FQN of the outermost module, as in torch. Shown to people as ``(root)``."""


class Phase(StrEnum):
    """The part of a training step in which something happened."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """A forward that activation checkpointing runs again while a backward is under way."""
    OPTIMIZER = "optimizer"
    OUTSIDE = "outside"
    """No module, backward or optimizer step was running: set-up, gradient clipping, checkpoints."""


class Source(StrEnum):
    """Who requested a collective."""

    FSDP = "fsdp"
    DTENSOR = "dtensor"
    DDP = "ddp"
    OBJECT = "object"
    """One of the ``*_object*`` collectives, which send pickled Python objects."""
    USER = "user"


class Role(StrEnum):
    """What a collective carries, where that is known."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    """Of parameters, on their way to the optimizer or through it."""
    ACTIVATIONS = "activations"
    """What a module's forward computes, and its gradients: their sizes follow the batch."""
    UNUSED_PARAMETERS = "unused parameters"
    """Which of them a backward did not use, on all ranks of DDP (``find_unused_parameters``)."""


COLLECTIVE_KINDS: Final = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
)
"""The known kinds. An operation that is none of them is kept as ``unknown:<op>``, never dropped."""


REDUCING: Final = frozenset({"reduce_scatter", "all_reduce", "reduce"})
"""The kinds that carry gradients, where FSDP or DDP sends them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One communication call, as this rank issued it."""

    index: int
    """Place in the recording, from 0."""
    kind: str
    """One of `COLLECTIVE_KINDS`, or ``unknown:<op>``."""
    op: str
    """The dispatcher's name of the operation, e.g. ``c10d._allgather_base_``. Never compared."""
    owner: str | None
    """FQN of the module whose parameters or activation it serves, those of a tied parameter joined
    with ``+``; None if it serves no module, or parameters of several that no unit has."""
    issued_in: str | None
    """FQN of the module that was running when it was issued; None outside every module. Differs
    from `owner` under prefetch."""
    phase: Phase
    axis: str
    """Name of the `MeshAxis`."""
    group_size: int
    """How many ranks take part."""
    dtype: str
    """Element type as torch prints it without its prefix (``"bfloat16"``); several are joined with
    ``+`` in order of appearance; empty for a barrier."""
    nbytes_sent: int
    """Bytes of the input tensors on this rank; 0 if it contributes none."""
    nbytes_received: int
    """Bytes of the output tensors on this rank; 0 if it receives none."""
    source: Source
    call_site: str
    """``path:line`` of the innermost user code; empty if unknown. Reported, never compared."""
    role: Role | None = None
    """Parameters or gradients of FSDP; gradients of DDP, and which parameters are unused;
    parameters, gradients or state too where storage or graph prove it; otherwise activations, of
    what is issued in a module's forward or in the backward of it. None for pickled objects, and for
    what serves no module: losses, norms."""
    peer: int | None = None
    """Of a send or a receive, the other rank, as its distance from this one in the group, counted
    upwards and around: 1 is the next rank, ``group_size - 1`` the one before. None for other kinds,
    for a receive from any rank, and if the group has no such rank."""
    root_rank: int | None = None
    """Of a broadcast or a scatter, the rank within the group whose data the others receive; of a
    reduce or a gather, the one that receives the result; from 0. None for other kinds, and if the
    group has no such rank."""
    reduce_op: str | None = None
    """``sum``, ``avg``, ``product``, ``min``, ``max``, ``band``, ``bor``, ``bxor`` or
    ``premul_sum``. None where nothing is reduced, and where torch does not show it."""
    is_async: bool | None = None
    """Whether the caller has to wait for it (``async_op=True``). None where torch does not say: for
    the functional collectives, for sends and receives, and in older torch."""
    ahead: int | None = None
    """As `Reshard.ahead`, of an all-gather that an unshard issued. None for all else."""
    backward: int | None = None
    """Of a reduction of gradients in backward or outside, the backward pass in which it was issued,
    or the last one before it: from 1, among those that added to these gradients. None for all else,
    and where there were fewer than two."""
    num_backwards: int | None = None
    """How many backward passes of the recording added to these gradients; None as `backward`."""

    @property
    def nbytes(self) -> int:
        """Message size in bytes: the larger of what goes in and what comes out on this rank.

        It is the size that nccl-tests calls ``size``: the gathered tensor of an all-gather, the
        full gradient of a reduce-scatter.
        """
        return max(self.nbytes_sent, self.nbytes_received)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """An FSDP unit gathered its parameters, or freed them again."""

    index: int
    """Place in the recording, from 0."""
    action: Literal["unshard", "reshard"]
    module: str | None
    """FQN of the unit's module; several modules of one unit are joined with ``+``; None if it is in
    none of the models that were recorded."""
    issued_in: str | None
    """FQN of the module that was running; None outside every module."""
    phase: Phase
    nbytes: int
    """Bytes of the unsharded parameters of the unit on this rank; 0 if unknown."""
    ahead: int | None = None
    """Of an unshard, how many units ahead of its use it was issued: 0 if the unit asks for it when
    its own forward or backward begins, 1 if it is prefetched while the unit before it is in use.
    Equal on all ranks that run the same units. None for a reshard, and if nothing used the unit
    before it was resharded or the block ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribution:
    """A DTensor changed its placements."""

    index: int
    """Place in the recording, from 0."""
    owner: str | None
    """FQN of the module whose activation or parameter it was; None if it serves no module."""
    issued_in: str | None
    """FQN of the module that was running; None outside every module."""
    phase: Phase
    source_placements: tuple[str, ...]
    """One placement per mesh axis, as torch prints it: ``("Shard(dim=0)", "Replicate()")``."""
    target_placements: tuple[str, ...]
    """As `source_placements`, after the redistribution."""
    mesh_axes: tuple[str, ...]
    """Names of the mesh axes, in the order of the placements."""
    is_explicit: bool
    """True where user code asked for it, False where an operator did."""
    nbytes: int
    """Bytes of this rank's local tensor before the redistribution."""
    call_site: str
    """``path:line`` of the innermost user code; empty if unknown. Reported, never compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A known reason why a recording is incomplete and must not be compared."""

    kind: Literal["unseen", "value_dependent", "idle_model"]
    """``unseen``: something was sent that was not recorded, or not as it was sent.
    ``value_dependent``: what is sent may depend on numbers that the fake group never exchanged.
    ``idle_model``: a model was given whose modules did not run, while those of another sent."""
    text: str
    """What is missing and why, or the code that reads the numbers; one line, without a full stop.
    """
    ranks: tuple[int, ...] = ()
    """The ranks that have it, ascending; empty for all ranks that were recorded."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Answer:
    """An assumed value that a simulated rank returned for a value it cannot compute."""

    site: str
    """``module:function`` of the innermost user code: without lines, which every edit moves."""
    how: str
    """What asked, e.g. ``item`` or ``torch.cuda.device_count``."""
    value: str
    """As Python prints it."""
    call_site: str = field(default="", compare=False)
    """``path:line`` of the same code. Reported, never compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """All that one rank recorded between entering and leaving ``comm_mode``."""

    rank: int
    """This rank, from 0; 0 without a process group."""
    world_size: int
    """Ranks of the default group; 1 without a process group."""
    backend: str
    """``gloo``, ``nccl``, ``fake``; empty without a process group. Shown, not compared."""
    torch_version: str
    """As ``torch.__version__``. Shown, not compared."""
    mesh_axes: tuple[MeshAxis, ...] = ()
    """The axes over which something was sent, sorted by name."""
    shows_async: bool = True
    """Whether this torch says which calls are asynchronous; older ones do not."""
    collectives: tuple[Collective, ...] = ()
    reshards: tuple[Reshard, ...] = ()
    redistributions: tuple[Redistribution, ...] = ()
    timings: tuple[tuple[str, float], ...] = ()
    """Host seconds between issue and return of calls, by category: ``all_gather``,
    ``all_gather_object``, ``reduce``, ``resharding``, or ``all``. Reported, never compared."""
    notes: tuple[str, ...] = ()
    """Remarks for readers, e.g. that the model was unsharded when the block began."""
    peak_gathered_nbytes: int = 0
    """The most bytes of FSDP parameters that were gathered on this rank at once, without padding,
    from the issue of each unshard to its reshard. What was gathered when the block began counts
    from then on; what ``reshard_after_forward=<int>`` leaves counts too."""
    gaps: tuple[Gap, ...] = ()
    """Known reasons why the recording is incomplete; also in the notes."""
    answers: tuple[Answer, ...] = ()
    """Each once, sorted; also in the notes. Empty unless simulated."""
