"""Record the training steps of a program, which end when its optimizers have stepped."""

# Note [Steps of a program]
# A training step ends when its optimizer has stepped, so it includes all micro-batches of a
# gradient accumulation. If several optimizers step together, it ends when all have stepped. To
# learn which optimizers those are, we watch the first training step without recording it: it is
# over once an optimizer steps a second time. A step that a GradScaler skips does not count. We
# reject optimizers that step during backward (one per parameter): no call of theirs ends the step.

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from pytest_fsdp_comm.errors import RecordingError, UnseenCollectivesWarning
from pytest_fsdp_comm.launch_environment import missing_torchrun_variables
from pytest_fsdp_comm.recording.comm_mode import CommMode
from pytest_fsdp_comm.recording.patches import patch_attributes, wrap_attribute
from pytest_fsdp_comm.recording.script import (
    FIRST,
    ScriptEnded,
    check_steps,
    make_too_short_error,
    run_script,
    watch_optimizer_steps,
)
from pytest_fsdp_comm.upstream import look_up


class StepRecorder:
    """Record training steps; call it after each optimizer step. See Note [Steps of a program]."""

    def __init__(self, mode: CommMode, first: int, last: int, *, ended: Callable[[], None]) -> None:
        """Record steps `first` to `last`, then call `ended`, which may raise."""
        self._mode, self._first, self._last = mode, first, last
        self._ended = ended
        self.models: list[nn.Module] = []
        """The models that the recorded optimizers train."""
        self.has_evaluation = False
        """Whether a trained model was set to evaluation mode while recording."""
        self._trained: list[nn.Module] = []
        self.count = 0
        self.is_done = False
        self._is_recording = self._is_skipped = False
        # The optimizers that step together, and those that have stepped in this step, keyed by id.
        self._together: dict[int, torch.optim.Optimizer] = {}
        self._stepped: dict[int, torch.optim.Optimizer] = {}
        self._num_calls = 0
        self._undo = contextlib.ExitStack()
        self._undo.enter_context(
            patch_attributes(
                wrap_attribute(torch.amp.GradScaler, "step", self._run_and_detect_skipped_step),
                wrap_attribute(nn.Module, "eval", self._run_and_note_eval),
            )
        )

    def __call__(self, optimizer: torch.optim.Optimizer, *, is_skipped: bool = False) -> None:
        """Record that an optimizer has stepped, or that a scaler has skipped its step."""
        if self.is_done:
            return
        self._num_calls += 1
        self._is_skipped |= is_skipped
        if id(optimizer) in self._stepped:
            self._together, self._stepped = self._stepped, {}
            self._is_skipped |= self._is_recording  # the recording began mid-step, so redo it
            self.count += 1
        self._stepped[id(optimizer)] = optimizer
        if self._together and self._together.keys() <= self._stepped.keys():
            self._end_step()

    def _end_step(self) -> None:
        self._stepped, is_skipped, self._is_skipped = {}, self._is_skipped, False
        self.count = (
            self._first - 1 if is_skipped and self._is_recording else self.count + (not is_skipped)
        )
        if self._is_recording and (is_skipped or self.count == self._last):
            self._end_recording()
            if is_skipped:
                _ = self._mode.recording  # mark it as read: the next block replaces it
            else:
                self.is_done = True
                self._undo.close()
                self.models = self.models or self._mode.models
                self._ended()
                return
        if not self._is_recording and self.count == self._first - 1:
            self._begin_recording()

    def _begin_recording(self) -> None:
        if look_up("torch._C", "_current_graph_task_id")() != -1:
            raise RecordingError(
                "the optimizers step during backward, so the recorder cannot tell where a training "
                "step ends; record a step in the script itself, with "
                "`with CommMode().saving(model, 'step.json'):`"
            )
        self.models = self._trained = _find_trained_modules(self._together.values())
        try:
            if self.models:  # otherwise FQNs are relative to the outermost module that runs
                self._mode(self.models)
        except RecordingError:  # the models are not parts of one model
            self.models = [nn.ModuleList(self.models)]
            self._mode(self.models)
        self._mode.__enter__()
        self._is_recording, self.has_evaluation = True, False

    def close(self) -> None:
        """Stop watching the program, even if it ended before the recording did."""
        self._end_recording()
        self._undo.close()

    def _end_recording(self) -> None:
        if self._is_recording:
            self._is_recording = False
            # A gap must not stop the script, even if warnings are errors: the recording lists it.
            with contextlib.suppress(UnseenCollectivesWarning):
                self._mode.__exit__(None, None, None)

    def _run_and_note_eval(self, evaluate: Any, module: nn.Module) -> object:
        is_trained = any(module is model for model in self._trained)
        self.has_evaluation |= self._is_recording and is_trained
        return evaluate(module)

    def _run_and_detect_skipped_step(
        self, step: Any, scaler: object, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> object:
        num_calls = self._num_calls
        result = step(scaler, optimizer, *args, **kwargs)
        if self._num_calls == num_calls:
            self(optimizer, is_skipped=True)
        return result


def _find_trained_modules(optimizers: Iterable[torch.optim.Optimizer]) -> list[nn.Module]:
    """Return the outermost modules that contain the optimizers' parameters, in parameter order."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    parameters = (parameter for group in groups for parameter in group["params"])
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    # Do not use isinstance(), which may run the code of a proxy.
    modules = [entry for entry in gc.get_objects() if issubclass(type(entry), nn.Module)]
    built = [module for module in modules if "_modules" in vars(module)]
    inner = {id(child) for module in built for child in module._modules.values()}
    roots = [
        (module, {id(parameter) for parameter in module.parameters()})
        for module in built
        if id(module) not in inner
    ]
    roots = [(root, ids) for root, ids in roots if not ids.isdisjoint(indices)]
    first: dict[int, nn.Module] = {}
    for root, ids in roots:
        # A module with only some of a model's parameters is not a model, but, for example, a loss
        # that holds the model's last layer.
        if not any(ids < other_ids for _, other_ids in roots):
            first.setdefault(min(indices[trained] for trained in ids & indices.keys()), root)
    return [module for _, module in sorted(first.items())]


def keep_existing_group() -> AbstractContextManager[None]:
    """Make a script use the existing process group: creating or destroying any has no effect."""
    names = ("init_process_group", "destroy_process_group")
    holders = (dist, distributed_c10d)
    return patch_attributes(
        *((where, name, lambda *_, **__: None) for where in holders for name in names)
    )


@contextlib.contextmanager
def add_torchrun_variables() -> Iterator[None]:
    """Give a script the environment variables with which torchrun would start it."""
    # Tests do not have these all the time: a pytest that a test starts would take them for those of
    # a launcher, and a program that a test starts would connect to MASTER_ADDR.
    variables = missing_torchrun_variables(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def record_script(
    comm_mode: CommMode,
    script: str | Callable[[], object],
    *arguments: str,
    step: int = FIRST,
    is_module: bool = False,
) -> nn.Module | list[nn.Module]:
    """Run a training script until one of its steps has ended, and record that step.

    The script runs as ``__main__`` on every rank, and uses the process group of the test. A
    training step lasts from one step of the script's optimizers to the next.

    Args:
        comm_mode: The fixture that records the step.
        script: The path of the script, or a training function without parameters.
        arguments: Command-line arguments of the script.
        step: The step to record, at least 3.
        is_module: Whether `script` is the name of a module, as after ``python -m``.

    Returns:
        The trained model, for ``fsdp_tree``; a list if it has several parts, or a ``ModuleList`` if
        there are several models, in the order of their optimizers.

    Raises:
        RecordingError: The script ended before the step did.
    """
    check_steps(step, step)

    def end() -> None:
        raise ScriptEnded(0)

    recorder = StepRecorder(comm_mode, step, step, ended=end)
    with (
        add_torchrun_variables(),
        keep_existing_group(),
        watch_optimizer_steps(recorder),
        contextlib.suppress(ScriptEnded),
    ):
        try:
            run_script(script, arguments, is_module=is_module)
        finally:
            recorder.close()
    if not recorder.is_done:
        raise make_too_short_error(recorder.count, step)
    return recorder.models[0] if len(recorder.models) == 1 else recorder.models
