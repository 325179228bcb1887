"""Define the events that make up one rank's recording."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from pytest_fsdp_comm.comm.mesh import MeshAxis

ROOT_FQN: Final = ""
"""The FQN of the outermost module, as in torch. Printed as ``(root)``."""


class Phase(StrEnum):
    """The part of a training step in which a call was issued."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """A forward that activation checkpointing reruns during backward."""
    OPTIMIZER = "optimizer"
    """An optimizer step, or one of torch's functions that clip gradients."""
    OUTSIDE = "outside"
    """Outside all modules, backwards and optimizer phases: the loss, logging, checkpoints."""


class Source(StrEnum):
    """Who requested a collective."""

    FSDP = "fsdp"
    DTENSOR = "dtensor"
    DDP = "ddp"
    OBJECT = "object"
    """One of the ``*_object*`` collectives, which send pickled Python objects."""
    USER = "user"


class Role(StrEnum):
    """The kind of data that a collective sends."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    """Gradients of parameters, whether sent before or during the optimizer step."""
    ACTIVATIONS = "activations"
    """Tensors that a module's forward computes, and their gradients. Sizes depend on the batch."""
    UNUSED_PARAMETERS = "unused parameters"
    """DDP's map of the parameters that backward used (with ``find_unused_parameters=True``)."""
    BUFFERS = "buffers"
    """Buffers that DDP broadcasts from one rank before forward (``broadcast_buffers``)."""


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
"""The supported kinds; any other operation is recorded as ``unknown:<op>``."""

REDUCING: Final = frozenset({"reduce_scatter", "all_reduce", "reduce"})
"""The kinds that reduce tensors. Gradients are reduced by collectives of these kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The operations of a module that can run at the same time as a collective, and so hide it."""

    module: str | None
    """FQN of the innermost module whose forward or backward runs them; None outside all modules."""
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One communication call that a rank issued."""

    index: int
    """Position in the recording, starting at 0."""
    kind: str
    """One of `COLLECTIVE_KINDS`, or ``unknown:<op>``."""
    op: str
    """The name in torch's dispatcher, such as ``c10d._allgather_base_``. Never compared."""
    owner: str | None
    """FQN of the module whose parameters, gradients or activations are sent. If several modules
    form one unit or share a tied parameter, their FQNs are joined with ``+``. None for a call
    without a module."""
    issued_in: str | None
    """FQN of the module that was running; None outside all modules. For a prefetch, this differs
    from the owner."""
    phase: Phase
    axis: str
    """Name of the `MeshAxis`."""
    group_size: int
    dtype: str
    """The element type without ``torch.``, such as ``bfloat16``; several are joined with ``+`` in
    order of appearance. Empty for a barrier."""
    nbytes_sent: int
    """Bytes of the input tensors on this rank; 0 if there are none."""
    nbytes_received: int
    """Bytes of the output tensors on this rank; 0 if there are none."""
    source: Source
    call_site: str
    """``path:line`` of the innermost user code; empty if unknown. Reported, never compared."""
    is_of_backward: bool = False
    """Whether `call_site` is the line that calls ``.backward()``; False if it is in a hook."""
    role: Role | None = None
    """Parameters or gradients if FSDP or DDP issued the call, or if the tensor's autograd graph or
    storage shows that the call sends them. Otherwise, activations if the call was issued in a
    module's forward or backward. None for all other calls, such as reductions of losses and
    norms, and for pickled objects."""
    peer: int | None = None
    """For a send or receive, the distance to the other rank, wrapping around the group: 1 is the
    next rank. None for other kinds, for a receive from any rank, and if the other rank is not in
    the group."""
    root_rank: int | None = None
    """Group rank, starting at 0, of the rank that sends a broadcast or scatter, or receives a
    reduce or gather. None for other kinds, and if that rank is not in the group."""
    reduce_op: str | None = None
    """``sum``, ``avg``, ``product``, ``min``, ``max``, ``band``, ``bor``, ``bxor`` or
    ``premul_sum``. None if this is not a reduction, or if torch does not report the op."""
    is_async: bool | None = None
    """Whether the call returns before it is complete (``async_op=True``). None if torch does not
    report it: for functional collectives, sends and receives, and in older versions of torch."""
    ahead: int | None = None
    """`Reshard.ahead` of the unshard that issued this all-gather; None for other calls."""
    backward: int | None = None
    """For a reduction of gradients in the backward or outside phase, the number of the backward
    pass that issued it, or of the last pass before it. Numbers start at 1 and count only passes
    that added to these gradients. None for other calls, and for fewer than two passes."""
    num_backwards: int | None = None
    """Number of backward passes that added to these gradients; None if `backward` is None."""
    parameters: tuple[str, ...] = ()
    """For a reduction of an FSDP2 unit: the FQNs of the parameters whose gradients it carries.
    Empty if it carries the gradients of all the unit's parameters, and for other calls."""
    group_ranks: tuple[int, ...] = ()
    """The group's global ranks, in group order, unless they follow from this rank and the axis;
    see `mesh.is_aligned`. Leaving them out makes the recordings of most ranks equal."""
    group_number: int = 1
    """The number of the group among the axis's groups of the same ranks, oldest first."""
    is_unordered: bool = False
    """Whether another thread or a callback of a `torch.Future` issued the call, so that timing
    decides its position among the other calls."""
    exposed: bool | None = None
    """Whether no operation with FLOPs can run at the same time as this call. None on real ranks."""
    beside: tuple[Beside, ...] = ()
    """The modules that can run at the same time, in order. Reported, never compared."""

    @property
    def nbytes(self) -> int:
        """The message size in bytes, as in nccl-tests: the larger of input and output on this rank.

        For an all-gather, this is the gathered tensor; for a reduce-scatter, the full gradient.
        """
        return max(self.nbytes_sent, self.nbytes_received)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """An FSDP unit gathered its parameters (unshard) or freed them (reshard)."""

    index: int
    """Position in the recording, starting at 0."""
    action: Literal["unshard", "reshard"]
    module: str | None
    """FQN of the unit's module. If a unit has several modules, their FQNs are joined with ``+``.
    None if no recorded model contains the unit."""
    issued_in: str | None
    """FQN of the module that was running; None outside all modules."""
    phase: Phase
    nbytes: int
    """Bytes of the unit's unsharded parameters on this rank; 0 if unknown."""
    ahead: int | None = None
    """How early an unshard was issued, counted in units before its use: 0 if the unit's forward or
    backward issues it, 1 if it is prefetched while the previous unit is in use. Equal on all ranks
    that run the same units. None for a reshard, and if the unsharded parameters were not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribution:
    """A DTensor was redistributed to other placements."""

    index: int
    """Position in the recording, starting at 0."""
    owner: str | None
    """FQN of the module whose activation or parameter was redistributed; None without a module."""
    issued_in: str | None
    """FQN of the module that was running; None outside all modules."""
    phase: Phase
    source_placements: tuple[str, ...]
    """One placement per mesh axis, as torch prints it: ``("Shard(dim=0)", "Replicate()")``."""
    target_placements: tuple[str, ...]
    mesh_axes: tuple[str, ...]
    """Names of the mesh axes, in the order of the placements."""
    is_explicit: bool
    """True if user code requested the redistribution, False if a DTensor operator did."""
    nbytes: int
    """Bytes of this rank's local tensor before the redistribution."""
    call_site: str
    """``path:line`` of the innermost user code; empty if unknown. Reported, never compared."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HostWait:
    """The host waited for the GPU of a simulated rank, and issued nothing in the meantime."""

    index: int
    """Position in the recording, starting at 0."""
    way: str
    """What waits: a way to read values, such as ``item``, ``tolist`` or ``boolean_index``; or
    ``copy_to_host``, ``copy_to_device``, ``synchronize`` or ``barrier``."""
    owner: str | None
    """FQN of the running module, or of the FSDP unit that waits; None without a module."""
    issued_in: str | None
    """FQN of the module that was running; None outside all modules."""
    phase: Phase
    call_site: str
    """``path:line`` of the innermost user code; empty if unknown. Reported, never compared."""

    def __repr__(self) -> str:
        """Return a short text, because pytest prints it if an assertion about host waits fails."""
        site = f" at {self.call_site}" if self.call_site else ""
        return f"<HostWait {self.way} in {self.phase} of {self.owner or 'no module'}{site}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A known reason why a recording is incomplete and must not be compared."""

    kind: Literal["unseen", "value_dependent", "idle_model"]
    """``unseen``: a call was recorded wrongly or not at all. ``value_dependent``: calls may
    depend on values that the fake process group does not exchange. ``idle_model``: the model passed
    to `comm_mode` did not run, but another model issued collectives."""
    text: str
    """The reason in one line, without a full stop."""
    ranks: tuple[int, ...] = ()
    """The ranks with this gap, ascending; empty for all recorded ranks."""


SKIPPED: Final = "skipped"
"""The value of an `Answer` if a simulated rank has skipped a call, such as a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Answer:
    """A value that a simulated rank assumed because it could not compute the real one."""

    site: str
    """``module:function`` of the innermost user code; line numbers would change with any edit."""
    how: str
    """The operation that read the value, such as ``item`` or ``torch.cuda.device_count``."""
    value: str
    """The value's repr."""
    call_site: str = field(default="", compare=False)
    """``path:line`` of the code in `site`. Reported, never compared."""

    @property
    def note(self) -> str:
        """The answer's entry in `Recording.notes`."""
        if self.value == SKIPPED:
            return f"{self.call_site} skipped {self.how}, and what it would have sent"
        return f"{self.call_site} received the assumed value {self.value} ({self.how})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """All events of one rank in one ``comm_mode`` block, in the order in which they were issued."""

    rank: int
    """The global rank; 0 if there is no process group."""
    world_size: int
    """Number of ranks in the default group; 1 if there is no process group."""
    backend: str
    """Backend of the default group, such as ``gloo``, ``nccl`` or ``fake``; empty if there is no
    process group. Reported, never compared."""
    torch_version: str
    """The value of ``torch.__version__``. Reported, never compared."""
    mesh_axes: tuple[MeshAxis, ...] = ()
    """The axes over which collectives communicated, sorted by name."""
    shows_async: bool = True
    """Whether this torch reports which calls are asynchronous; older versions do not."""
    collectives: tuple[Collective, ...] = ()
    reshards: tuple[Reshard, ...] = ()
    redistributions: tuple[Redistribution, ...] = ()
    shows_overlap: bool = False
    """Whether the recording shows which calls are exposed, and where the host waits. Only those of
    simulated ranks do."""
    host_waits: tuple[HostWait, ...] = ()
    timings: tuple[tuple[str, float], ...] = ()
    """The seconds that the host spent in the calls of each category: ``all_gather``,
    ``all_gather_object``, ``reduce``, ``resharding`` and ``all``. Reported, never compared."""
    notes: tuple[str, ...] = ()
    """Remarks for readers, e.g. that the model was unsharded when the block began."""
    peak_gathered_nbytes: int = 0
    """Peak bytes of the FSDP parameters gathered on this rank, without padding. A parameter counts
    from the moment its unshard is issued until its reshard. Includes parameters that were gathered
    before the block, and the part that ``reshard_after_forward=<int>`` keeps gathered."""
    gaps: tuple[Gap, ...] = ()
    """Known reasons why the recording is incomplete; the notes repeat them."""
    answers: tuple[Answer, ...] = ()
    """Assumed values, sorted and without duplicates; the notes repeat them. Empty on real ranks."""
