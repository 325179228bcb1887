"""Skips the saves of a recorded script, because simulated tensors have no data to write."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Final

import torch

from pytest_fsdp_comm.recording.frames import find_call_site
from pytest_fsdp_comm.recording.patches import Replacement
from pytest_fsdp_comm.recording.value_dependence import SKIPPED, note_answer
from pytest_fsdp_comm.simulation.memory import SimulationError

_CHECKPOINT: Final = "torch.distributed.checkpoint"
_CHECKPOINTS: Final = ("save", "async_save", "save_state_dict")


class SkippedSaves:
    """The saves that a simulated rank has skipped; `str` returns a note, empty without saves."""

    def __init__(self) -> None:
        self._places: dict[str, None] = {}

    def __str__(self) -> str:
        if not self._places:
            return ""
        places = ", ".join(self._places)
        return f"note: a simulated rank has no data to save, so these calls wrote nothing: {places}"

    def patches(self) -> Iterator[Replacement]:
        """Yield the arguments of `setattr` for each function that saves tensors."""
        yield torch, "save", self._wrap_save(torch.save)
        # Import these here, because most simulations save nothing.
        for module in map(
            importlib.import_module, (_CHECKPOINT, f"{_CHECKPOINT}.state_dict_saver")
        ):
            for name in _CHECKPOINTS:
                yield module, name, self._wrap_checkpoint(getattr(module, name))
        with contextlib.suppress(ImportError):
            safetensors = importlib.import_module("safetensors.torch")
            for name in ("save", "save_file"):
                yield safetensors, name, self._wrap_serializer(getattr(safetensors, name))

    def _note_skipped_save(self, how: str) -> None:
        self._places[f"{find_call_site()} ({how})"] = None

    def _wrap_save(self, save: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(save)
        def run(data: object, file: object, *args: object, **kwargs: object) -> None:
            try:
                # torch notices simulated tensors only after it has replaced the file.
                save(data, io.BytesIO(), *args, **kwargs)
            except SimulationError:
                self._note_skipped_save("torch.save")
            else:
                save(data, file, *args, **kwargs)

        return run

    def _wrap_checkpoint(self, save: Callable[..., object]) -> Callable[..., object]:
        # Ranks exchange their plans for a checkpoint, even if it contains no tensors.
        @functools.wraps(save)
        def run(*_: object, **__: object) -> object:
            how = f"torch.distributed.checkpoint.{save.__name__}"
            self._note_skipped_save(how)
            note_answer(SKIPPED, how)
            done: Future[None] = Future()
            done.set_result(None)
            return done if save.__name__ == "async_save" else None

        return run

    def _wrap_serializer(self, save: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(save)
        def run(*args: object, **kwargs: object) -> object:
            try:
                return save(*args, **kwargs)
            except SimulationError:
                self._note_skipped_save(f"safetensors.torch.{save.__name__}")
                return b"" if save.__name__ == "save" else None

        return run
