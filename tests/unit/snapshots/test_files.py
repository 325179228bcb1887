"""A snapshot file is written whole or not at all, and nothing else is left beside it."""

import os
import signal
import stat

import pytest

from pytest_fsdp_comm.snapshots.files import write_atomically

# The system calls of a write, in order; a process can be killed before or after each.
STEPS = {
    "new": ["open", "open", "link"],
    "replaced": ["open", "open", "link", "open", "link", "rename"],
    "new, without O_TMPFILE": ["open", "open", "rename"],
    "replaced, without O_TMPFILE": ["open", "open", "rename"],
}


def killed_while_writing(path, case, step, *, is_after):
    """Writes in a child that is killed at one of its system calls."""
    pid = os.fork()
    if pid == 0:
        calls = 0

        def counted(real):
            def call(*args, **kwargs):
                nonlocal calls
                calls += 1
                dies = calls == step
                if dies and not is_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    if "without" in case and _asks_for_tmpfile(args):
                        raise OSError
                    return real(*args, **kwargs)
                finally:
                    if dies:
                        os.kill(os.getpid(), signal.SIGKILL)

            return call

        os.open, os.link, os.replace = map(counted, (os.open, os.link, os.replace))
        write_atomically(path, "new " * 10_000)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _asks_for_tmpfile(args):
    return len(args) > 1 and isinstance(args[1], int) and args[1] & os.O_TMPFILE == os.O_TMPFILE


@pytest.mark.parametrize("case", STEPS)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_file(tmp_path, case):
    path = tmp_path / "test_a.ws4.comm"
    count = len(STEPS[case])
    seen = set()
    for step in range(1, count + 1):
        for is_after in (False, True):
            path.unlink(missing_ok=True)
            if "replaced" in case:
                path.write_text("old")
            assert killed_while_writing(path, case, step, is_after=is_after) == -signal.SIGKILL
            text = path.read_text() if path.exists() else None
            seen.add(text)
            assert text in {"old" if "replaced" in case else None, "new " * 10_000}
            # Between a name and its renaming something is left, which the next write takes away.
            left = {file.name for file in tmp_path.iterdir()} - {path.name}
            assert left <= {f".{path.name}.unfinished"}
            if case == "new":
                assert not left
            write_atomically(path, "whole")
            assert [file.name for file in tmp_path.iterdir()] == [path.name]
            assert path.read_text() == "whole"
    assert len(seen) == 2
    # No step is missing above.
    assert killed_while_writing(path, case, count + 1, is_after=False) == 0 or case == "new"


def test_permissions_are_those_of_a_new_file(tmp_path):
    (tmp_path / "mine").write_text("")
    for _ in range(2):
        write_atomically(tmp_path / "snapshot", "text")
        mode = stat.S_IMODE((tmp_path / "snapshot").stat().st_mode)
        assert mode == stat.S_IMODE((tmp_path / "mine").stat().st_mode)


def test_an_interrupt_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "test_a.ws4.comm"
    path.write_text("old")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
