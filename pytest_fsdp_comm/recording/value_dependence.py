"""Find code on the fake group whose communication may depend on the values of tensors."""

# Note [Values on the fake group]
# The fake group exchanges nothing, so values that come from other ranks are wrong there. Most code
# never looks at them; what does is recorded as if the values were true.

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
from pytest_fsdp_comm.recording.active import entered
from pytest_fsdp_comm.recording.frames import (
    call_site_of,
    find_caller,
    outwards,
    torch_files,
    whose,
)
from pytest_fsdp_comm.recording.operations import tensors_in
from pytest_fsdp_comm.recording.pending import IN_MODULES


class ValueReads:
    """The places of one block where user code reads the values of tensors, each once."""

    def __init__(self, attribute: Callable[[], tuple[Phase, str]]) -> None:
        """Prepare; `attribute` gives the phase that runs, and the innermost user code."""
        self._attribute = attribute
        self.gaps: dict[Gap, None] = {}
        """One for each place, in the order in which they were first reached."""

    def note_operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        name = func.overloadpacket.__name__
        # Of an index, torch tags every use, though only a mask makes the shape depend on values.
        if name == "index" and not any(
            index is not None and index.dtype in {torch.bool, torch.uint8} for index in args[1]
        ):
            return
        if name == "repeat_interleave" and kwargs.get("output_size") is not None:
            return
        users_words = {"_local_scalar_dense": "item", "index": "a boolean mask"}
        self.note(users_words.get(name, name))

    def note(self, how: str) -> None:
        """Note how values are read, if user code does it in forward or backward."""
        frame = _requesting_frame()
        if frame is None:
            return
        # ``one_hot`` reads the least value to check it, in C++: no frame of its own tells it from
        # its caller. It makes no shape of values where it is given the number of classes.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if re.search(r"\bone_hot\(.*,", line):
            return
        phase, call_site = self._attribute()
        if phase in IN_MODULES:
            self._add(f"{call_site} reads the values of a tensor ({how})")

    def note_splits(self, bound: Mapping[str, Any], call_site: str) -> None:
        """Note an all-to-all whose parts differ in size, as those of routed tokens do."""
        parts = [bound.get(name) or () for name in ("input_split_sizes", "output_split_sizes")]
        parts += [
            [tensor.numel() for tensor in tensors_in(bound.get(name))]
            for name in ("input_tensors", "output_tensors")
        ]
        if any(len(set(sizes)) > 1 for sizes in parts):
            self._add(f"{call_site} sends parts of unequal size (all_to_all)")

    def _add(self, text: str) -> None:
        self.gaps[Gap(kind="value_dependent", text=text)] = None


class KeptAnswers:
    """What was answered outside of recordings: most code asks for a device before a block begins.

    A test has what itself and the fixtures that it uses have asked, whichever test set these up.
    """

    def __init__(self) -> None:
        self._of_fixtures: dict[str, dict[Answer, None]] = {}
        self._used: Container[str] = ()
        self.asked: dict[Answer, None] = {}
        """By the test, or by the fixture that is being set up."""

    def begin(self, used: Container[str]) -> None:
        """Begin a test, which uses the fixtures `used`, by name."""
        self._used, self.asked = used, {}

    @contextlib.contextmanager
    def by(self, fixture: str) -> Iterator[None]:
        """Keep what the block asks for as long as a fixture lives."""
        outer, self.asked = self.asked, self._of_fixtures.setdefault(fixture, {})
        try:
            yield
        finally:
            self.asked = outer

    def forget(self, fixture: str) -> None:
        self._of_fixtures.pop(fixture, None)

    def __iter__(self) -> Iterator[Answer]:
        yield from self.asked
        for fixture, asked in self._of_fixtures.items():
            if fixture in self._used:
                yield from asked


answers_of_process: Final = KeptAnswers()


def note_answer(value: object, how: str, *, of_process: bool = False) -> None:
    """Note what the innermost user code is told in place of something that nobody knows."""
    frame = find_caller()
    site = f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}" if frame else "?"
    answer = Answer(value=str(value), site=site, how=how, call_site=call_site_of(frame))
    kept = (answers_of_process.asked,)
    for held in kept if of_process else (own.answers for own in entered()):
        held.setdefault(answer)


_num_tellers = 0


@contextlib.contextmanager
def told_of_values() -> Iterator[None]:
    """Have recordings told of reads by whoever runs the block, in place of kernels and methods."""
    global _num_tellers  # noqa: PLW0603  # as the patches are, it is the process's
    _num_tellers += 1
    try:
        yield
    finally:
        _num_tellers -= 1


def caller_reports_reads() -> bool:
    """Whether `told_of_values` is under way."""
    return bool(_num_tellers)


def _requesting_frame() -> FrameType | None:
    """The innermost frame that requested the operation which runs; None if it is no user's."""
    for frame in outwards(sys._getframe(1)):
        requests = _requests(frame.f_code.co_filename)
        if requests is not None:
            return frame if requests else None
    return None


@functools.cache
def _requests(path: str) -> bool | None:
    """Whether code of a file acts for a user; None if it passes on what its caller requests."""
    owner = whose(path)
    if owner == "torch":
        return None if path.startswith(_PASSES_ON) else False
    if owner == "library":
        # transformers' own code outside of its models looks at masks and positions.
        return None if "/numpy/" in path else Path(path).parent.name != "transformers"
    return True if owner == "user" else None


_PASSES_ON: Final = tuple(
    torch_files() + path
    for path in (
        *("_tensor.py", "functional.py", "_jit_internal.py", "_ops.py", "overrides.py"),
        *("distributed/tensor/_api.py", "distributed/tensor/_dispatch.py"),
        *("distributed/_functional_collectives.py", "_compile.py", "_dynamo/"),
        "utils/_python_dispatch.py",
    )
)
"""Files of torch that only pass on what their caller requests."""


def shows_values(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a method shows values to Python, or makes a shape of them."""
    # Only indices in a tensor are values.
    return name != "tensor_split" or any(
        isinstance(value, torch.Tensor) for value in (*args[1:2], *kwargs.values())
    )
