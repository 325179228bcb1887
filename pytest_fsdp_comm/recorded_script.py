"""The part of ``fsdp-comm record`` that needs torch, loaded once the script has imported torch."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pytest_fsdp_comm.comm.events import Recording
from pytest_fsdp_comm.comm.json import ScriptRun, join_recordings, load_recordings
from pytest_fsdp_comm.comm.profile import CommProfile
from pytest_fsdp_comm.command_line.documents import merge_recordings, summary_lines
from pytest_fsdp_comm.errors import (
    FsdpCommError,
    IncompleteRecordingError,
    RanksDivergedError,
    printable,
)
from pytest_fsdp_comm.gathering import RankFiles
from pytest_fsdp_comm.recording.comm_mode import CommMode, publish
from pytest_fsdp_comm.recording.mesh_axes import rank_size_and_backend
from pytest_fsdp_comm.recording.script import make_too_short_error
from pytest_fsdp_comm.recording.steps import StepRecorder
from pytest_fsdp_comm.sharding.capture import capture_tree
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.text.codec import from_json, to_json
from pytest_fsdp_comm.text.files import write_all_atomically
from pytest_fsdp_comm.text.words import show_path
from pytest_fsdp_comm.tree.model import ShardTree
from pytest_fsdp_comm.tree.profile import TreeFacts, tree_facts
from pytest_fsdp_comm.tree.profile import merge as merge_trees

_TIMEOUT_S: Final = 60.0
_STDERR: Final = 2


class RecordedScript:
    """Records steps on this rank; one rank writes the recordings of all ranks to files."""

    def __init__(self, run: ScriptRun, out: Path, *, force: bool) -> None:
        self._run, self._out, self._force = run, out, force
        self._json, self._tree = out.with_suffix(".json"), out.with_suffix(".tree.comm")
        self._files, self._tree_files = RankFiles(self._json), RankFiles(self._tree)
        self._rank, self._num_ranks, backend = rank_size_and_backend()
        # A simulated rank has no peers, so it writes the files, whichever rank it simulates.
        self._is_fake = backend == "fake"
        self._is_writer = self._is_fake or self._rank == 0
        if self._is_writer:
            self._files.clear()
            self._tree_files.clear()
        self._mode = CommMode(trace_operations=False)
        self.recorder = StepRecorder(
            self._mode, run.first_step, run.last_step, ended=self._check_and_start_writing
        )
        self._notes: list[str] = []
        self._writing: threading.Thread | None = None
        self._problem: FsdpCommError | None = None

    def _check_and_start_writing(self) -> None:
        recording, models = self._mode.recording, self.recorder.models
        if not (recording.backend or recording.collectives):
            raise FsdpCommError(
                "the script trained without a process group, so it cannot have communicated; start "
                "its ranks: fsdp-comm record --nproc 4 train.py"
            )
        if self.recorder.has_evaluation:
            self._notes.append(
                "the recording includes an evaluation, because the model's eval() was called; to "
                "guard training alone, record another step (--step)"
            )
        tree = capture_tree(models) if models else None
        # Write in a thread, so that the script does not have to wait for the other ranks.
        self._writing = threading.Thread(target=self._publish_and_write, args=(recording, tree))
        self._writing.start()

    def _publish_and_write(self, recording: Recording, tree: ShardTree | None) -> None:
        try:
            publish(recording, self._files)
            facts = None if tree is None else tree_facts(tree)
            self._tree_files.publish(self._rank, json.dumps(to_json(facts)))
            if not self._is_writer:
                return
            num_ranks = 1 if self._is_fake else self._num_ranks
            texts, trees = (
                files.collect(num_ranks, timeout_s=_TIMEOUT_S)
                for files in (self._files, self._tree_files)
            )
            joined = join_recordings(texts, self._run)
            comm = merge_recordings(load_recordings(joined))
            files = {
                self._out: str(SnapshotText.from_profile(comm, where=str(self._out))),
                self._json: joined,
            }
            if (tree_text := self._make_tree_snapshot(trees, comm)) is not None:
                files[self._tree] = tree_text
            for note in dict.fromkeys((*comm.notes, *self._notes)):
                self._print_to_stderr(f"note: {note}")
            self._check_and_write_files(files, comm)
        except FsdpCommError as problem:
            self._problem = problem
        except Exception as problem:  # noqa: BLE001  # for example OSError
            self._problem = FsdpCommError(f"cannot write {self._out}: {problem}")

    def _check_and_write_files(self, files: Mapping[Path, str], comm: CommProfile) -> None:
        if comm.divergence is not None:
            raise RanksDivergedError(f"nothing was written, because {comm.divergence}")
        gaps = [gap.text for gap in comm.gaps]
        if gaps:
            raise IncompleteRecordingError(
                f"nothing was written, because the recording is incomplete: {'; '.join(gaps)}"
            )
        differing = [
            show_path(file) for file, text in files.items() if _has_text_other_than(file, text)
        ]
        if differing and not self._force:
            is_same = differing == [show_path(self._json)]
            why = " (it also has lines of code and the script's arguments)" if is_same else ""
            raise FsdpCommError(
                f"nothing was written, because {' and '.join(differing)} would change{why}. Pass "
                "--force to replace the files, or --out other.comm to keep them"
            )
        write_all_atomically(files)
        summary, names = "; ".join(summary_lines(comm)), ", ".join(map(show_path, files))
        self._print_to_stderr(f"{self._run.steps} of {self._run.script}: {summary}. Wrote {names}")

    def _make_tree_snapshot(self, trees: dict[int, str], comm: CommProfile) -> str | None:
        if "null" in trees.values():
            self._notes.append(
                "wrote no tree, because the optimizers' parameters do not belong to one model"
            )
            return None
        facts = {text: from_json(TreeFacts, json.loads(text)) for text in {*trees.values()}}
        profile = merge_trees(
            {rank: facts[text] for rank, text in trees.items()},
            backend=comm.backend,
            torch_version=comm.torch_version,
        )
        return str(SnapshotText.from_profile(profile, where=str(self._tree)))

    def _print_to_stderr(self, text: str) -> None:
        # Write to standard error: standard output belongs to the script. Bypass Python's buffer,
        # which may hold half a line of the script and is lost if a launcher ends this process.
        with contextlib.suppress(OSError):
            os.write(_STDERR, f"fsdp-comm: {printable(text)}\n".encode(errors="backslashreplace"))

    def finish(self) -> FsdpCommError | None:
        """Wait until all files are written; return the problem, if any."""
        if self._writing is not None:
            self._writing.join()
        if not self.recorder.is_done:
            self.recorder.close()
            return make_too_short_error(self.recorder.count, self._run.last_step)
        return self._problem


def _has_text_other_than(path: Path, text: str) -> bool:
    """Return whether a file exists and has a different text, ignoring CRLF line ends."""
    try:
        return path.read_text(encoding="utf-8") != text
    except FileNotFoundError:
        return False
    except UnicodeDecodeError:
        return True
