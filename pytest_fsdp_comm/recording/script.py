"""Run a training script as Python would, and call back after each optimizer step."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.text.words import show_count

_OPTIMIZER: Final = "torch.optim.optimizer"
FIRST: Final = 3
"""The first step that can be recorded; earlier steps are needed to learn where a step ends."""


class ScriptEnded(SystemExit):
    """Raised to end a script after the recorded step; ``except Exception`` does not catch it."""


@contextlib.contextmanager
def watch_optimizer_steps(stepped: Callable[..., None]) -> Iterator[None]:
    """While the block runs, call `stepped` after each optimizer step, with the optimizer."""
    # Do not import torch here: the script may first set environment variables that torch reads.
    handles: list[Any] = []

    def register(module: Any) -> None:
        hook = module.register_optimizer_step_post_hook(lambda optimizer, *_: stepped(optimizer))
        handles.append(hook)

    finder = _OnImport(_OPTIMIZER, register)
    if _OPTIMIZER in sys.modules:
        register(sys.modules[_OPTIMIZER])
    else:
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _OnImport(MetaPathFinder):
    """Call `imported` with the module `name` as soon as it has been imported."""

    def __init__(self, name: str, imported: Callable[[object], None]) -> None:
        self._name, self._imported = name, imported

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002  # the import system passes it
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                self._imported(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # only this loader
        return spec


def run_script(
    script: str | Callable[[], object], arguments: Sequence[str], *, is_module: bool = False
) -> None:
    """Run a script, a module (like ``python -m``) or a function, with command-line arguments."""
    argv, path, main = sys.argv, [*sys.path], sys.modules["__main__"]
    sys.argv = [script if isinstance(script, str) else argv[0], *arguments]
    try:
        if not isinstance(script, str):
            script()
        elif is_module:
            sys.path[0] = os.getcwd()  # noqa: PTH109  # as ``python -m`` does
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            # Do not use runpy.run_path, which sets `__file__` and sys.argv[0] to the same path:
            # Python makes only `__file__` absolute.
            file = str(Path(script).absolute())
            sys.modules["__main__"] = module = ModuleType("__main__")
            vars(module).update(__file__=file, __builtins__=builtins, __cached__=None)
            exec(compile(Path(file).read_bytes(), file, "exec"), vars(module))  # noqa: S102  # the user's script
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main


def check_steps(first: int, last: int) -> None:
    """Raise a RecordingError if the steps `first` to `last` cannot be recorded."""
    if not FIRST <= first <= last:
        raise RecordingError(
            f"expected steps from {FIRST} on, such as {FIRST} or {FIRST}-{FIRST + 1}, got "
            f"{first if first == last else f'{first}-{last}'}; earlier steps show the recorder "
            "which optimizers step together, and issue collectives that later steps do not repeat"
        )


def make_too_short_error(count: int, last: int) -> RecordingError:
    """Return the error for a script that ended before step `last`."""
    return RecordingError(
        f"the script ended after {show_count(count, 'optimizer step')} in this process, before "
        f"step {last} ended: let it run longer; if it ended because it needs GPUs, simulate it "
        "(--world-size 64); if it starts processes or uses no optimizer of torch.optim, record in "
        "the script itself: with CommMode().saving(model, 'step.json'):"
    )
