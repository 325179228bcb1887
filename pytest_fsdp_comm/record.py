"""``fsdp-comm record``: run a training script and record the communication of its steps."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.comm.json import ScriptRun
from pytest_fsdp_comm.command_line.terminal import FAILED, SAME, print_note
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.launch_environment import MAX_SIMULATED, torchrun_variables
from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.recording.script import (
    ScriptEnded,
    check_steps,
    make_too_short_error,
    run_script,
    watch_optimizer_steps,
)

if TYPE_CHECKING:
    from pytest_fsdp_comm.recorded_script import RecordedScript

# The script must run exactly as it does without this program. So the program writes nothing to
# standard output, lets the script's errors end the process as usual, and imports torch only after
# the script has (or earlier, to simulate a rank). Ranks exchange their recordings as files.

# How long to wait for gloo's threads to free the collectives of the backward pass. Freeing a
# collective needs Python, because c10d's AsyncWork owns a ThreadLocalState (read in torch 2.13). If
# a thread frees a collective while Python exits, the process aborts.
_GLOO_ENDS_S: Final = 0.1
_LAUNCHED: Final = re.compile("RANK|WORLD_SIZE")
_NO_LAUNCHER: Final = (
    "a launcher such as torchrun sets these variables; to start 4 ranks, pass --nproc 4"
)
# From torch 2.7 to 2.15: without a driver, without CUDA, without NCCL, and with NCCL but no GPU.
_GPU_MISSING: Final = re.compile(
    "no NVIDIA driver|CUDA enabled|NCCL built in|at least one CUDA device|no GPUs found"
)
_NO_GPU: Final = (
    "to record this script without GPUs, simulate one of its ranks: pass --world-size N instead of "
    "--nproc"
)
_EXISTS: Final = (
    "if the new recording differs, nothing will be written unless you pass --force or --out"
)
_STEPS: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)


def run(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm record``; return the script's exit status, or 2 if only recording failed."""
    steps = _STEPS.fullmatch(options.step)
    if steps is None:
        raise FsdpCommError(f"--step: expected a step, such as 3 or 3-4, got {options.step!r}")
    first_step, last_step = int(steps[1]), int(steps[2] or steps[1])
    check_steps(first_step, last_step)
    if not options.out.endswith(".comm"):
        raise FsdpCommError(f"--out: expected the name of a .comm file, got {options.out!r}")
    if not options.command:
        raise FsdpCommError("expected a script to run: fsdp-comm record [--step 3] train.py ...")
    if not (options.module or Path(options.command[0]).is_file()):
        raise FsdpCommError(f"there is no file {options.command[0]}; use -m to run a module")
    _check_simulation_options(options)
    if options.nproc:
        arguments = ["record", "--step", options.step, "--out", options.out]
        flags = {"--go-on": options.go_on, "--force": options.force, "-m": options.module}
        arguments += [*filter(flags.get, flags), *options.command]
        ranks = ["--standalone", "--nproc-per-node", str(options.nproc), "-m", "pytest_fsdp_comm"]
        if options.nproc > 1:  # torchrun sets this, too, but prints a warning
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        command = [sys.executable, "-m", "torch.distributed.run", *ranks, *arguments]
        os.execv(sys.executable, command)  # noqa: S606  # so that signals reach the launcher
    script, *arguments = options.command
    script_run = ScriptRun(
        script=script,
        arguments=tuple(arguments),
        is_module=options.module,
        first_step=first_step,
        last_step=last_step,
        local_world_size=options.local_world_size,
    )
    # Use an absolute path, because the script may change the working directory.
    out = Path(options.out).absolute()
    if out.exists() and not options.force and os.environ.get("RANK", "0") == "0":
        print_note(f"{options.out} exists: {_EXISTS}")
    hook = _Hook(script_run, out, force=options.force, goes_on=options.go_on)
    skipped: object = ""
    with contextlib.ExitStack() as undo:
        if options.world_size:
            skipped = undo.enter_context(_simulate_rank(options))
        undo.enter_context(watch_optimizer_steps(hook.note_step))
        status = _run_script_and_get_status(options)
    status = hook.finish(status)
    if note := str(skipped):
        print_note(note)
    return status


def _check_simulation_options(options: argparse.Namespace) -> None:
    size = options.world_size
    if options.nproc and size:
        raise FsdpCommError(
            "expected --nproc for real ranks or --world-size for a simulated one, got both"
        )
    for name, least, most in (
        ("world_size", 1, MAX_SIMULATED),
        ("rank", 0, (size or 1) - 1),
        ("local_world_size", 1, size or 1),
    ):
        number, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if number and size is None:
            raise FsdpCommError(
                f"{flag}: expected --world-size, too: only a simulation records one rank"
            )
        if number is not None and not least <= number <= most:
            of_size = "" if name == "world_size" else f" with --world-size {size}"
            raise FsdpCommError(f"{flag}: expected {least} to {most}{of_size}, got {number}")


@contextlib.contextmanager
def _simulate_rank(options: argparse.Namespace) -> Iterator[object]:
    """Simulate a rank of the script; yield an object whose text is a note about skipped saves."""
    rank, size = options.rank, options.world_size
    os.environ |= torchrun_variables(rank, size, options.local_world_size)
    # Load this now: without triton, torch's FLOP counter warns if torch claims to support CUDA.
    importlib.import_module("pytest_fsdp_comm.recorded_script")
    from pytest_fsdp_comm.ranks.rank.process_group import skip_rendezvous  # noqa: PLC0415  # loads torch
    from pytest_fsdp_comm.simulation.world import add_memory_remedy, simulate_script  # noqa: PLC0415  # as above

    try:
        with skip_rendezvous(rank, size), simulate_script() as skipped:
            yield skipped
    except RuntimeError as error:
        add_memory_remedy(error)
        raise


def _run_script_and_get_status(options: argparse.Namespace) -> int:
    """Run a script; print its error as Python would, and return its exit status."""
    script, *arguments = options.command
    try:
        run_script(script, arguments, is_module=options.module)
        # Python waits for these processes, too, but only after this program has reported that the
        # script was too short. A process that is a rank fails, and its error must come first.
        for process in multiprocessing.active_children() if options.world_size else ():
            if not process.daemon:
                process.join()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or SAME
        print(ended.code, file=sys.stderr)  # noqa: T201  # as Python does
        return 1
    except KeyboardInterrupt as error:
        # Let Python print the error, because Python then exits as if SIGINT had killed it.
        trace, hook = _strip_outer_frames(error.__traceback__), sys.excepthook
        sys.excepthook = lambda kind, error, _: hook(kind, error.with_traceback(trace), trace)
        raise
    except Exception as error:  # noqa: BLE001  # any error of the script
        error.__traceback__ = _strip_outer_frames(error.__traceback__)
        if isinstance(error, FsdpCommError):  # a simulated rank raised it
            from pytest_fsdp_comm.simulation.world import strip_inner_frames  # noqa: PLC0415  # loads torch

            strip_inner_frames(error)
        sys.excepthook(type(error), error, error.__traceback__)
        if "RANK" not in os.environ and _LAUNCHED.search(str(error)):
            print_note(_NO_LAUNCHER)
        if not options.world_size and _GPU_MISSING.search(str(error)):
            print_note(_NO_GPU)
        return 1
    return SAME


def _strip_outer_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Strip the outermost frames of a traceback that belong to this package or to runpy."""
    package = str(Path(__file__).parent)
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not (file.startswith((package, "<frozen runpy")) or file.endswith("runpy.py")):
            break
        traceback = traceback.tb_next
    return traceback


class _Hook:
    """Records steps of a script; call `note_step` after each optimizer step."""

    def __init__(self, run: ScriptRun, out: Path, *, force: bool, goes_on: bool) -> None:
        self._run, self._out, self._force, self._goes_on = run, out, force, goes_on
        self._recorded: RecordedScript | None = None
        self._problem: FsdpCommError | None = None
        self._has_ended_script = False

    def note_step(self, optimizer: Any) -> None:
        is_over = True
        try:
            if self._problem is None:
                from pytest_fsdp_comm.recorded_script import RecordedScript  # noqa: PLC0415  # loads torch

                self._recorded = self._recorded or RecordedScript(
                    self._run, self._out, force=self._force
                )
                self._recorded.recorder(optimizer)
                is_over = self._recorded.recorder.is_done
        except FsdpCommError as problem:
            self._problem = problem
        except Exception as problem:  # noqa: BLE001  # our bug, or a warning under -W error
            self._problem = FsdpCommError(f"{type(problem).__name__}: {problem}")
        if is_over and not self._goes_on:
            self._has_ended_script = True
            raise ScriptEnded(SAME if self._problem is None else FAILED)

    def finish(self, status: int) -> int:
        """Wait until all files are written, print any problem, and return the exit status."""
        problem, rank = self._problem, os.environ.get("RANK", "0")
        if self._recorded is not None:
            write_problem = self._recorded.finish()
            # If the script failed before the recorded step, its error already explains why nothing
            # was recorded.
            if status == SAME or self._recorded.recorder.is_done:
                problem = problem or write_problem
        elif problem is None and status == SAME:
            problem = make_too_short_error(0, self._run.last_step)
        if self._has_ended_script:
            from pytest_fsdp_comm.ranks.rank.process_group import leave_group  # noqa: PLC0415  # loads torch

            leave_group()
            time.sleep(extend_under_load(_GLOO_ENDS_S))
        if problem is None:
            return status
        # Let every rank print its problem, because the launcher may end the other ranks after one
        # rank has failed.
        if rank == "0" or status == SAME or self._problem is not None:
            print_note(f"{problem}" if rank == "0" else f"rank {rank}: {problem}")
        return status or FAILED
