"""``fsdp-comm record``: runs a training script, and writes what its steps send."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.comm.json import ScriptRun
from pytest_fsdp_comm.command_line.terminal import FAILED, SAME
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.launch_environment import MAX_SIMULATED, simulated_variables
from pytest_fsdp_comm.recording.script import ScriptEnded, optimizer_steps, run_script, too_short

if TYPE_CHECKING:
    from pytest_fsdp_comm.recorded_script import RecordedScript

# Note [Nothing of the script's]: this process is the script's, so torch is imported when the script
# imports it, standard output is the script's alone, and an error of the script ends it as without
# us. What ranks recorded they exchange as files.

_GLOO_ENDS_S: Final = 0.1
# Its threads drop what was sent in backward, for which they need Python (read in torch 2.13: c10d's
# AsyncWork has a ThreadLocalState with the context); one that does while Python ends aborts.
_STEPS: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)


def run(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm record``; returns the exit status of the script, or of an error of ours."""
    steps = _STEPS.fullmatch(options.step)
    if steps is None:
        raise FsdpCommError(f"--step: expected a step, such as 3, or 3-4, got {options.step!r}")
    if not options.out.endswith(".comm"):
        raise FsdpCommError(f"--out: expected the name of a .comm file, got {options.out!r}")
    if not options.command:
        raise FsdpCommError("expected a script to run: fsdp-comm record [--step 3] train.py ...")
    if not (options.module or Path(options.command[0]).is_file()):
        raise FsdpCommError(f"there is no file {options.command[0]}; -m takes the name of a module")
    _check_simulation(options)
    if options.nproc:
        own = ["record", "--step", options.step, "--out", options.out]
        own += [*["--go-on"] * options.go_on, *["-m"] * options.module, *options.command]
        ranks = ["--standalone", "--nproc-per-node", str(options.nproc), "-m", "pytest_fsdp_comm"]
        command = [sys.executable, "-m", "torch.distributed.run", *ranks, *own]
        os.execv(sys.executable, command)  # noqa: S606  # so that signals reach the launcher
    script, *arguments = options.command
    ran = ScriptRun(
        script=script,
        arguments=tuple(arguments),
        is_module=options.module,
        first_step=int(steps[1]),
        last_step=int(steps[2] or steps[1]),
        local_world_size=options.local_world_size,
    )
    # The script may change the directory.
    hook = _Hook(ran, Path(options.out).absolute(), goes_on=options.go_on)
    with contextlib.ExitStack() as undo:
        if options.world_size:
            undo.enter_context(_simulated(options))
        undo.enter_context(optimizer_steps(hook.stepped))
        status = _status_of(lambda: run_script(script, arguments, is_module=options.module))
    return hook.finish(status)


def _check_simulation(options: argparse.Namespace) -> None:
    size = options.world_size
    if options.nproc and size:
        raise FsdpCommError("expected --nproc for real ranks or --world-size for one, got both")
    for name, least, most in (
        ("world_size", 1, MAX_SIMULATED),
        ("rank", 0, (size or 1) - 1),
        ("local_world_size", 1, size or 1),
    ):
        number = getattr(options, name)
        if number is not None and not least <= number <= most:
            flag = f"--{name.replace('_', '-')}"
            of_size = "" if name == "world_size" else f" with --world-size {size or 1}"
            raise FsdpCommError(f"{flag}: expected {least} to {most}{of_size}, got {number}")


@contextlib.contextmanager
def _simulated(options: argparse.Namespace) -> Iterator[None]:
    rank, size = options.rank, options.world_size
    os.environ |= simulated_variables(rank, size, options.local_world_size)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    from pytest_fsdp_comm.ranks.rank.process_group import join_fake_group  # noqa: PLC0415  # loads torch
    from pytest_fsdp_comm.recording.steps import keeping_group  # noqa: PLC0415  # as above
    from pytest_fsdp_comm.simulation.world import note_memory, simulated  # noqa: PLC0415  # as above

    join_fake_group(rank, size)
    try:
        with keeping_group(), simulated(answers=True):
            yield
    except RuntimeError as error:
        note_memory(error)
        raise


def _status_of(run: Callable[[], None]) -> int:
    """The exit status of a script, after what Python would print of its end."""
    try:
        run()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or SAME
        print(ended.code, file=sys.stderr)  # noqa: T201  # as Python does
        return 1
    except KeyboardInterrupt as error:
        # Python prints it, and ends as if the signal had ended it.
        shown, hook = _of_script(error.__traceback__), sys.excepthook
        sys.excepthook = lambda kind, one, _: hook(kind, one.with_traceback(shown), shown)
        raise
    except Exception as error:  # noqa: BLE001  # the script's
        error.__traceback__ = _of_script(error.__traceback__)
        if isinstance(error, FsdpCommError):  # of a simulated rank
            from pytest_fsdp_comm.simulation.world import of_user  # noqa: PLC0415  # loads torch

            of_user(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return SAME


def _of_script(traceback: TracebackType | None) -> TracebackType | None:
    """The part below what runs the script."""
    ours = str(Path(__file__).parent)
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not (file.startswith((ours, "<frozen runpy")) or file.endswith("runpy.py")):
            break
        traceback = traceback.tb_next
    return traceback


class _Hook:
    """Called after each step of an optimizer: by the first one the script has imported torch."""

    def __init__(self, ran: ScriptRun, out: Path, *, goes_on: bool) -> None:
        self._given, self._goes_on = (ran, out), goes_on
        self._recorded: RecordedScript | None = None
        self._problem: FsdpCommError | None = None
        self._has_ended_script = False

    def stepped(self, optimizer: Any) -> None:
        is_over = True
        try:
            if self._problem is None:
                from pytest_fsdp_comm.recorded_script import RecordedScript  # noqa: PLC0415  # loads torch

                self._recorded = self._recorded or RecordedScript(*self._given)
                self._recorded.recorder(optimizer)
                is_over = self._recorded.recorder.is_done
        except FsdpCommError as problem:
            self._problem = problem
        except Exception as problem:  # noqa: BLE001  # ours, or a warning where those are errors
            self._problem = FsdpCommError(f"{type(problem).__name__}: {problem}")
        if is_over and not self._goes_on:
            self._has_ended_script = True
            raise ScriptEnded(SAME if self._problem is None else FAILED)

    def finish(self, status: int) -> int:
        """Wait for what is written; the exit status of the script, unless only ours failed."""
        problem, rank = self._problem, os.environ.get("RANK", "0")
        if self._recorded is not None:
            ended = self._recorded.finish()
            # A script that failed before that step has said why.
            if status == SAME or self._recorded.recorder.is_done:
                problem = problem or ended
        elif problem is None and status == SAME:
            problem = too_short(0, self._given[0].last_step)
        if self._has_ended_script:
            from pytest_fsdp_comm.ranks.rank.process_group import leave_group  # noqa: PLC0415  # loads torch

            # Threads of gloo that are still there when the process ends may abort it.
            leave_group()
            time.sleep(_GLOO_ENDS_S)
        if problem is None:
            return status
        # Each rank for itself: one that fails may have the launcher end the others.
        if rank == "0" or status == SAME or self._problem is not None:
            whose = "" if rank == "0" else f"rank {rank}: "
            print(f"fsdp-comm: {whose}{problem}", file=sys.stderr)  # noqa: T201  # an error's place
        return status or FAILED
