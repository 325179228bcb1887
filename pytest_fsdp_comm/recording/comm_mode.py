"""The fixture ``comm_mode``: record blocks, then query, compare and save the recordings."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn, optim

from pytest_fsdp_comm.comm.divergence import find_divergence, find_divergence_of, list_calls
from pytest_fsdp_comm.comm.events import Collective, HostWait, Recording, Redistribution, Reshard
from pytest_fsdp_comm.comm.json import dump_recordings, join_recordings
from pytest_fsdp_comm.comm.profile import CommProfile, fold, merge
from pytest_fsdp_comm.comm.questions import Answer, Question, select
from pytest_fsdp_comm.errors import (
    FsdpCommError,
    RanksDivergedError,
    RecordingError,
    UnseenCollectivesWarning,
    printable,
)
from pytest_fsdp_comm.gathering import RankFiles, gather_values
from pytest_fsdp_comm.recording.comm_debug import CommDebugAnswers, RecordedBlock
from pytest_fsdp_comm.recording.estimates import Estimate, measure_block
from pytest_fsdp_comm.recording.mesh_axes import find_axes, rank_size_and_backend
from pytest_fsdp_comm.recording.owners.attribution import BackwardMap
from pytest_fsdp_comm.recording.owners.module_names import read_model_parts
from pytest_fsdp_comm.recording.private import READER
from pytest_fsdp_comm.recording.recorder import Recorder
from pytest_fsdp_comm.text.files import write_atomically
from pytest_fsdp_comm.text.words import show_count, show_nbytes
from pytest_fsdp_comm.upstream import private_names


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchanged:
    """What ranks exchange to merge their recordings."""

    profile: CommProfile
    calls: str
    """`RankCalls.digest`."""


class CommMode(CommDebugAnswers):
    """Record the communication of a block of code.

    In ``with comm_mode(model):``, FQNs are relative to ``model``. In ``with comm_mode:``, they are
    relative to the outermost module that ran. If several outermost modules ran, FQNs below the
    second begin with ``@2``, below the third with ``@3``, and so on, in the order in which the
    modules first ran. If no module ran, FQNs are relative to the root of an earlier block, or else
    to the FSDP root. Collectives of other threads have no owner. The recording stays available
    until the next block starts.
    """

    def __init__(
        self,
        *,
        gather: Callable[[str], list[str]] = lambda text: [text],
        ranks: Sequence[int] = (),
        show: Callable[[CommProfile], str] | None = None,
        trace_operations: bool = True,
    ) -> None:
        """Create a recorder; entering it starts a recording.

        Args:
            gather: Sends this rank's string to the other ranks, and returns the strings of all
                ranks; the default is for a single process.
            ranks: The ranks of the test, in ascending order; empty if there is only this process.
            show: Formats the profile for ``str``; without it, ``str`` returns the ``repr``.
            trace_operations: Whether blocks trace operations by default. Tracing is slow.
        """
        self._traces_by_default = self._traces = trace_operations
        self._gather = gather
        self._ranks = ranks
        self._show = show
        self._models: Sequence[nn.Module] = ()  # only until the next block is entered
        self._running: tuple[Recorder, AbstractContextManager[object]] | None = None
        self._block: RecordedBlock | None = None
        self._estimated: optim.Optimizer | bool = False
        self._estimate: Callable[[], Estimate] | None = None
        # Whether the last recording has been read, and how many earlier ones were never read.
        self._is_read, self._unread_blocks = True, 0
        # All blocks of a test share these, because a backward in a later block may run through
        # modules of an earlier block.
        self._backward = BackwardMap()
        self._roots: tuple[weakref.ref[nn.Module], ...] = ()

    def __call__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        trace_operations: bool | None = None,
        estimate: optim.Optimizer | bool = False,
    ) -> Self:
        """Set the model that FQNs in the next block are relative to.

        Args:
            model: Any module; usually the FSDP root. Pass a list if this rank runs several parts of
                one model, such as pipeline stages. Each FQN is then relative to its part, and the
                root of every part is ``(root)``.
            trace_operations: Whether the block also records which operations run in which modules,
                for the tables and JSON of CommDebugMode. None for the default, which is False for
                the fixture.
            estimate: Pass the optimizer, or True if there is none, to read `comm_mode.estimate`
                later. The model must then be an FSDP2 root.

        Raises:
            RecordingError: `model` is not a module, two parts have a parameter of the same name,
                or one part contains another.
        """
        self._models = read_model_parts(
            model, given_to="comm_mode", otherwise=", or use `with comm_mode:`"
        )
        if trace_operations is not None:
            self._traces = trace_operations
        self._estimated = estimate
        return self

    def __enter__(self) -> Self:
        """Start recording.

        Without a process group, every count is 0, and a comparison with a snapshot fails.

        Raises:
            RecordingError: A block is already being recorded.
        """
        if self._running is not None:
            raise RecordingError(
                "comm_mode is already recording and cannot be nested. To examine a part, use two "
                "consecutive blocks, or .events of the outer one"
            )
        models, self._models = self._models, ()
        traces, self._traces = self._traces, self._traces_by_default
        estimated, self._estimated, self._estimate = self._estimated, False, None
        with contextlib.ExitStack() as block:
            block.enter_context(private_names(READER))
            recorder = Recorder(models, self._backward, self._roots, traces_operations=traces)
            block.enter_context(recorder.watch())
            # Enter this last, so that FSDPMemTracker wraps our patches of FSDP, not vice versa.
            if estimated is not False:
                optimizer = None if estimated is True else estimated
                self._estimate = block.enter_context(measure_block(models, optimizer))
            watching = block.pop_all()
        self._running, self._block = (recorder, watching), None
        self._unread_blocks += not self._is_read
        self._is_read = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop recording; after an exception, the events recorded so far stay available."""
        if self._running is None:
            return
        recorder, watching = self._running
        self._running = None
        try:
            watching.__exit__(kind, value, traceback)
        finally:
            if self._estimate is not None:
                # Store only the values: the function would keep the model and optimizer alive.
                self._estimate = functools.partial(replace, self._estimate())
            self._block = recorder.finish()
            self._roots = self._block.roots or self._roots
        # Do not warn after an exception: if warnings are errors, the warning would replace it.
        unseen = [gap.text for gap in self._block.recording.gaps if gap.kind == "unseen"]
        if unseen and kind is None:
            warnings.warn(
                f"comm_mode: the recording is incomplete: {'; '.join(unseen)}",
                UnseenCollectivesWarning,
                stacklevel=2,
            )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CommMode):
            return self.profile == other.profile
        return NotImplemented

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        """Return a single line, because pytest prints it when a test with the fixture fails."""
        if self._running is not None:
            return "<CommMode: recording>"
        if self._block is None:
            return "<CommMode: nothing recorded yet>"
        totals = self.profile.totals()
        count = sum(total.count for total in totals)
        unsized = sum(total.unsized for total in totals)
        nbytes = show_nbytes(sum(total.nbytes for total in totals), unsized)
        return f"<CommMode: {show_count(count, 'collective')}, {nbytes}>"

    def __str__(self) -> str:
        if self._block is None or self._show is None:
            return repr(self)
        return self._show(self.profile)

    @property
    def recording(self) -> Recording:
        """This rank's recording of the running block so far, or of the last block.

        Raises:
            RecordingError: No block has begun yet.
        """
        return self._read_block().recording

    def _read_block(self) -> RecordedBlock:
        self._is_read = True
        if self._running is not None:
            return self._running[0].build_block_so_far()
        if self._block is None:
            raise RecordingError(
                "comm_mode has no recording yet; run the code in `with comm_mode(model):` first, "
                "and query it in the block or after it"
            )
        return self._block

    @property
    def models(self) -> list[nn.Module]:
        """The roots that the last block's FQNs are relative to, if they have parameters."""
        references = self._block.roots if self._block else ()
        roots = [root for root in (reference() for reference in references) if root is not None]
        return [root for root in roots if any(True for _ in root.parameters())]

    @property
    def events(self) -> tuple[Collective, ...]:
        """The collectives in the order in which they were issued."""
        return self.recording.collectives

    @property
    def reshards(self) -> tuple[Reshard, ...]:
        """The unshard and reshard events of FSDP units, in order."""
        return self.recording.reshards

    @property
    def redistributions(self) -> tuple[Redistribution, ...]:
        """The DTensor redistributions that communicated, in order."""
        return self.recording.redistributions

    @property
    def host_waits(self) -> tuple[HostWait, ...]:
        """The places where the host waits for the GPU, in order.

        Raises:
            RecordingError: This rank is not simulated, so nobody knows where the host waits.
        """
        return self._require_simulated_recording("host_waits").host_waits

    def _require_simulated_recording(self, question: str) -> Recording:
        if not self.recording.shows_overlap:
            raise RecordingError(
                f"comm_mode.{question} needs a simulated rank: which calls are exposed, and where "
                "the host waits, is not known on real ranks; mark the test with "
                "@pytest.mark.distributed(world_size=..., simulate=True)"
            )
        return self.recording

    @property
    def peak_gathered_nbytes(self) -> int:
        """Peak size in bytes of the FSDP parameters gathered on this rank at the same time."""
        return self.recording.peak_gathered_nbytes

    @property
    def estimate(self) -> Estimate:
        """The estimated peak memory and operations of this rank; never compared with a snapshot.

        Raises:
            RecordingError: The last block was entered without ``estimate=``.
        """
        if self._estimate is None:
            raise RecordingError(
                "comm_mode has no estimate; request it where the block begins: "
                "`with comm_mode(model, estimate=optimizer):`"
            )
        return self._estimate()

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of host time, keyed by category; reported, but never compared."""
        return dict(self.recording.timings)

    @property
    def profile(self) -> CommProfile:
        """This rank's recording, folded into rows of counts and bytes."""
        return fold(self.recording)

    def merged_profile(self, *, allow_divergence: bool = False) -> CommProfile:
        """Return the rows of all ranks, merged. Every rank must call this.

        Args:
            allow_divergence: Whether to return the profile even if ranks issue different calls. Its
                `divergence` then says where.

        Raises:
            RanksDivergedError: Ranks of a process group issue different calls, or different orders
                of calls.
            RecordingError: The block is still running; it ran without a process group; or earlier
                blocks were neither compared nor queried.
        """
        if self._running is not None:
            raise RecordingError(
                "comm_mode was compared with a snapshot inside the block, before the recording was "
                "complete; compare it after the block"
            )
        unread, self._unread_blocks = self._unread_blocks, 0
        if unread:
            raise RecordingError(
                f"comm_mode recorded {unread + 1} blocks, but a comparison covers only the last "
                "one; use a single block, or compare after each block (comm_snapshot(name=...) "
                "stores each in a separate file). If only the last one matters, run the "
                "others without comm_mode"
            )
        if not (self.recording.backend or self.recording.collectives):
            raise RecordingError(
                "comm_mode recorded without a process group, so nothing could be sent and a "
                "snapshot would guard nothing; mark the test with "
                "@pytest.mark.distributed(world_size=...), or call "
                "torch.distributed.init_process_group() before the block"
            )
        # Drop the rank's number, so that ranks with identical recordings exchange equal strings.
        profile, calls = self.profile, list_calls(self.recording)
        sent = _Exchanged(profile=replace(profile, recorded_ranks=()), calls=calls.digest)
        gathered = gather_values(self._gather, "comm_mode", sent)
        ranks = self._ranks or profile.recorded_ranks
        merged = merge([of_rank.profile for of_rank in gathered], ranks=ranks)
        if len({of_rank.calls for of_rank in gathered}) > 1:
            # Only now exchange the calls, because most ranks make equal calls.
            calls_of_ranks = gather_values(self._gather, "comm_mode", calls)
            divergence = find_divergence(dict(zip(ranks, calls_of_ranks, strict=True)))
            merged = replace(merged, divergence=divergence)
        if merged.divergence is not None and not allow_divergence:
            raise RanksDivergedError(str(merged.divergence))
        return merged

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all ranks' recordings of the last block to one file. Every rank must call this.

        Args:
            path: A ``.json`` file, for ``fsdp-comm show`` and ``diff``. Only one rank writes it.

        Raises:
            FsdpCommError: The path does not end with ``.json``.
            RanksDivergedError: Ranks of a process group issue different calls, or different orders
                of calls. The file is written nevertheless.
            RecordingError: The block is still running, or none has begun.
        """
        name = os.fspath(path)
        if not name.endswith(".json"):
            raise FsdpCommError(f"comm_mode.save writes .json files, got {name!r}")
        if self._running is not None:
            raise RecordingError(
                "comm_mode was saved inside the block, before the recording was complete; save it "
                "after the block"
            )
        recordings = gather_values(self._gather, "comm_mode.save", self.recording)
        if self.recording.rank == min(recording.rank for recording in recordings):
            write_atomically(Path(name), dump_recordings(recordings))
        divergence = find_divergence_of(recordings)
        if divergence is not None:
            raise RanksDivergedError(f"{divergence}; the recordings are in {name}")

    @contextlib.contextmanager
    def saving(
        self,
        model: nn.Module | Sequence[nn.Module],
        path: str | os.PathLike[str],
        *,
        timeout_s: float = 60.0,
    ) -> Iterator[None]:
        """Record a block on all ranks of a program that is not a test, and save the recordings.

        Every rank must enter the block. The ranks exchange files in the folder of `path`, without
        using the program's process groups, and rank 0 writes `path` on a separate thread. An error
        in the recorder becomes a warning and does not stop the program.

        Args:
            model: The same as for ``comm_mode(model)``.
            path: A ``.json`` file on a file system that all machines share. It has the
                format of `save`, but no host seconds, and stores identical recordings once.
            timeout_s: The seconds that rank 0 waits for the other ranks after the block.
        """
        is_recording = False
        with _turn_errors_into_warnings("recorded nothing"):
            files = RankFiles(Path(path))
            if not os.fspath(path).endswith(".json"):
                raise FsdpCommError(f"saving expects a path that ends with .json, got {path}")
            if rank_size_and_backend()[0] == 0:
                files.clear()
            self(model).__enter__()
            is_recording = True
        try:
            yield
        except BaseException as error:
            with _turn_errors_into_warnings("did not end the recording"):
                self.__exit__(type(error), error, None)
            raise
        with _turn_errors_into_warnings(f"did not write {path}"):
            # Write the recording even if it has a gap and warnings are errors.
            with _turn_errors_into_warnings("has gaps", UnseenCollectivesWarning):
                self.__exit__(None, None, None)
            if is_recording:
                publish(self.recording, files)
                if self.recording.rank == 0:
                    arguments = (files, Path(path), self.recording.world_size, timeout_s)
                    threading.Thread(target=_write_joined_recordings, args=arguments).start()

    def counts(
        self,
        kind: str | None = None,
        *,
        phase: str | None = None,
        owner: str | None = None,
        axis: str | None = None,
        exposed: bool | None = None,
    ) -> int:
        """Return the number of matching collectives on this rank.

        If an assertion on the returned int fails, pytest prints the collectives it counted.

        Args:
            kind: E.g. ``"all_gather"``; None for all.
            phase: E.g. ``"backward"``; None for all.
            owner: FQN of the owner, ``""`` for the root, or a pattern as in snapshots:
                ``"layers.{0..3}"``, ``"(root)"``, ``"(no-module)"``. The ``*`` of
                ``"layers.*"`` matches one segment or part of a segment. None for all.
            axis: Name of the mesh axis; None for all.
            exposed: True for calls that no computation can hide, False for calls that some can.
                Only simulated ranks know. None for all.

        Raises:
            RecordingError: There is no such kind, phase, axis or owner, so the count would always
                be 0; nothing has been recorded yet; or `exposed` is not known.
        """
        __tracebackhide__ = True  # so that pytest reports an error at the caller's line
        question = Question(kind=kind, phase=phase, owner=owner, axis=axis, exposed=exposed)
        return self._measure_matching_collectives("counts", question, len)

    def nbytes(
        self,
        kind: str | None = None,
        *,
        phase: str | None = None,
        owner: str | None = None,
        axis: str | None = None,
        exposed: bool | None = None,
    ) -> int:
        """Return the bytes of matching collectives on this rank; see `counts` for the arguments."""
        __tracebackhide__ = True
        question = Question(kind=kind, phase=phase, owner=owner, axis=axis, exposed=exposed)
        return self._measure_matching_collectives(
            "nbytes", question, lambda events: sum(e.nbytes for e in events)
        )

    def _measure_matching_collectives(
        self, name: str, question: Question, measure: Callable[[tuple[Collective, ...]], int]
    ) -> int:
        __tracebackhide__ = True
        query = f"{name}({question})"
        block = self._read_block()
        if question.exposed is not None:
            self._require_simulated_recording(query)
        recorded, names = block.recording.collectives, block.names
        if question.axis is not None and question.axis not in names.axes:
            names = names.add_axes(find_axes(), recorded)
        if isinstance(question.axis, str):  # recordings store names in printable form
            axis = printable(question.axis)
            question = replace(question, axis=axis) if axis in names.axes else question
        matching = select(question, recorded, names)
        return Answer(measure(matching), query, matching, recorded)


def publish(recording: Recording, files: RankFiles) -> None:
    """Write a recording, without host seconds, for the rank that merges all recordings."""
    files.publish(recording.rank, dump_recordings([replace(recording, rank=0, timings=())]))


def _write_joined_recordings(
    files: RankFiles, path: Path, num_ranks: int, timeout_s: float
) -> None:
    with _turn_errors_into_warnings(f"did not write {path}"):
        texts = files.collect(num_ranks, timeout_s=timeout_s)
        write_atomically(path, join_recordings(texts))


@contextlib.contextmanager
def _turn_errors_into_warnings(problem: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn an error into a warning, or into a printed line where warnings are errors."""
    try:
        yield
    except kind as error:
        text = printable(f"comm_mode {problem}: {error}", "\n")
        try:
            warnings.warn(text, UnseenCollectivesWarning, stacklevel=3)
        except UnseenCollectivesWarning:
            print(text, file=sys.stderr)  # noqa: T201  # a warning would raise
