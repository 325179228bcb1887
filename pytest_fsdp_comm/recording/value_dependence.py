"""Find user code whose communication may depend on tensor values that a simulation lacks."""

# torch's fake process group exchanges nothing, so values that should come from other ranks are
# wrong. Code that reads them may communicate differently than in a real run, so each read is a gap.

from __future__ import annotations

import contextlib
import functools
import linecache
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

from pytest_fsdp_comm.comm.events import Answer, Gap, Phase
from pytest_fsdp_comm.recording.active import entered_recorders
from pytest_fsdp_comm.recording.frames import (
    call_site_of,
    find_author,
    find_caller,
    torch_path_prefix,
    walk_outwards,
)
from pytest_fsdp_comm.recording.operations import tensors_in
from pytest_fsdp_comm.recording.pending import IN_MODULES


class ValueReads:
    """Collect the lines of user code that read tensor values during a block."""

    def __init__(self, attribute: Callable[[], tuple[Phase, str]]) -> None:
        """Start with no gaps; `attribute` returns the current phase and line of user code."""
        self._attribute = attribute
        self.gaps: dict[Gap, None] = {}
        """One gap for each line and kind of read, in the order of the first reads."""

    def note_operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, object]) -> None:
        name = func.overloadpacket.__name__
        # torch tags all indexing as a read, but only a mask makes the shape depend on values.
        if name == "index" and not any(map(is_mask, args[1])):
            return
        if name == "repeat_interleave" and kwargs.get("output_size") is not None:
            return
        self.note_read(name_of_read(func))

    def note_read(self, how: str) -> None:
        """Add a gap for this read of values, if user code requested it in forward or backward."""
        frame = _find_requesting_user_frame()
        if frame is None:
            return
        # If the call passes the number of classes, the shape does not depend on values.
        if is_one_hot_with_classes(frame):
            return
        phase, call_site = self._attribute()
        if phase in IN_MODULES:
            self._add_gap(f"{call_site} reads the values of a tensor ({how})")

    def note_splits(self, bound: Mapping[str, Any], call_site: str) -> None:
        """Add a gap for an all-to-all with parts of different sizes, such as routed tokens."""
        parts = [bound.get(name) or () for name in ("input_split_sizes", "output_split_sizes")]
        parts += [
            [tensor.numel() for tensor in tensors_in(bound.get(name))]
            for name in ("input_tensors", "output_tensors")
        ]
        if any(len(set(sizes)) > 1 for sizes in parts):
            self._add_gap(f"{call_site} sends parts of unequal size (all_to_all)")

    def _add_gap(self, text: str) -> None:
        self.gaps[Gap(kind="value_dependent", text=text)] = None


class KeptAnswers:
    """Store assumed values that code received outside of blocks, mostly from device queries.

    A test's recordings list the values that its code and its fixtures received, even if an earlier
    test set the fixture up.
    """

    def __init__(self) -> None:
        self._of_fixtures: dict[str, dict[Answer, None]] = {}
        self._used: Container[str] = ()
        self.current: dict[Answer, None] = {}
        """The values returned to the running test, or to the fixture that is being set up."""

    def begin_test(self, used: Container[str]) -> None:
        """Begin a test that uses the fixtures named in `used`."""
        self._used, self.current = used, {}

    @contextlib.contextmanager
    def store_for(self, fixture: str) -> Iterator[None]:
        """Store the values assumed in the block under a fixture's name, until `forget_fixture`."""
        outer, self.current = self.current, self._of_fixtures.setdefault(fixture, {})
        try:
            yield
        finally:
            self.current = outer

    def forget_fixture(self, fixture: str) -> None:
        self._of_fixtures.pop(fixture, None)

    def __iter__(self) -> Iterator[Answer]:
        yield from self.current
        for fixture, answers in self._of_fixtures.items():
            if fixture in self._used:
                yield from answers


answers_of_process: Final = KeptAnswers()


def add_assumption(value: object, how: str, *, of_process: bool = False) -> None:
    """Record that user code receives an assumed value instead of an unknown value."""
    frame = find_caller()
    site = f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}" if frame else "?"
    answer = Answer(value=str(value), site=site, how=how, call_site=call_site_of(frame))
    process = (answers_of_process.current,)
    for answers in (
        process if of_process else (recorder.answers for recorder in entered_recorders())
    ):
        answers.setdefault(answer)


def _find_requesting_user_frame() -> FrameType | None:
    """Return the frame that requested the running operation; None if it is not user code."""
    for frame in walk_outwards(sys._getframe(1)):
        requests = _is_user_request(frame.f_code.co_filename)
        if requests is not None:
            return frame if requests else None
    return None


@functools.cache
def _is_user_request(path: str) -> bool | None:
    """Whether operations called in this file count as the user's; None if the caller decides."""
    owner = find_author(path)
    if owner == "torch":
        return None if path.startswith(_PASSES_ON) else False
    if owner == "library":
        # Ignore top-level files of transformers, but not its models: they read masks and positions.
        return None if "/numpy/" in path else Path(path).parent.name != "transformers"
    return True if owner == "user" else None


_PASSES_ON: Final = tuple(
    torch_path_prefix() + path
    for path in (
        *("_tensor.py", "functional.py", "_jit_internal.py", "_ops.py", "overrides.py"),
        *("distributed/tensor/_api.py", "distributed/tensor/_dispatch.py"),
        *("distributed/_functional_collectives.py", "_compile.py", "_dynamo/"),
        "utils/_python_dispatch.py",
    )
)
"""Files of torch that run operations on behalf of their callers."""


def is_one_hot_with_classes(frame: FrameType | None) -> bool:
    """Whether a frame calls ``one_hot`` with the number of classes."""
    # On the CPU, ``one_hot`` still reads the smallest value in C++, so only the source line shows
    # the call.
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame else ""
    return re.search(r"\bone_hot\(.*,", line) is not None


def name_of_read(func: Any) -> str:
    """Return the public name of an operation that reads tensor values."""
    name = str(func.overloadpacket.__name__)
    return {"_local_scalar_dense": "item", "index": "a boolean mask"}.get(name, name)


def is_mask(index: torch.Tensor | None) -> bool:
    """Whether an index selects elements by a mask."""
    return index is not None and index.dtype in {torch.bool, torch.uint8}


def is_value_read(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a method call returns values to Python, or makes a shape depend on them."""
    # `tensor_split` reads values only if its indices are a tensor.
    return name != "tensor_split" or any(
        isinstance(value, torch.Tensor) for value in (*args[1:2], *kwargs.values())
    )
