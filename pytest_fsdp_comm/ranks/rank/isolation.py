"""Makes the copied pytest session in a rank silent and local to the rank."""

from __future__ import annotations

import io
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from _pytest._io import TerminalWriter

from pytest_fsdp_comm import upstream

# Note [Private names of pytest]: those of 8.4 to 9.2 are used here and in `debugger`; each has a
# contract test in tests/unit/ranks/test_isolation.py.

# Plugins that write what only the parent may write: terminal, files, caches, xdist's channel.
_PARENTS_PLUGINS = (
    "terminalreporter",
    "lfplugin",
    "nfplugin",
    "stepwiseplugin",
    "pastebin",
    "dsession",
    "workerinteractor",
    # In one rank alone, a second run would meet collectives of ranks that do not run again.
    "rerunfailures",
    "fsdp-comm-ci",
    # Of pytest-github-actions-annotate-failures 0.4, which would annotate what each rank reports.
    "annotate_errors",
    "annotate_warnings",
    # Runs a test in a process of its own, as each rank is.
    "pytest_forked",
)
_PARENTS_CLASSES = ("LogXML", "WorkerInteractor", "DSession", "Reporter")

_PARENTS_CAPTURE = pytest.StashKey[object]()


class LogTerminal:
    """A rank's terminal reporter: where ``--setup-show`` and live logs go."""

    def __init__(self) -> None:
        self._tw = TerminalWriter(io.StringIO())

    def open(self, path: Path) -> None:
        # Not the rank's stdout, which a test may capture with capfd.
        self._tw = TerminalWriter(path.open("a", buffering=1, encoding="utf-8"))

    # For the handler of live logs, which begins them with an empty line and a title: in the session
    # the name of its rank is before each line instead.
    def write(self, text: str) -> None:
        if text.strip():
            self._tw.write(text)

    def section(self, *_: object, **__: object) -> None:
        pass


def isolate_session(config: pytest.Config, *, basetemp: Path) -> None:
    """Give a rank its own output files, and a new directory for temporary directories."""
    # A fork shares the temporary files of the parent's capture. A rank has none; its descriptors go
    # to files of its own instead, which keep what came before a crash.
    manager = capture_manager(config)
    if manager is not None:
        # Kept alive: collected, its files would warn of not being closed, which -W error makes
        # fatal.
        config.stash[_PARENTS_CAPTURE] = manager._global_capturing
        # Not stop_global_capturing(): it would write the parent's captured text to the terminal.
        manager._global_capturing = None
        manager._method = "no"
        manager.start_global_capturing()
    factory: Any = getattr(config, "_tmp_path_factory", None)
    if factory is None:
        return
    require(factory, "TempPathFactory", "_basetemp", "_given_basetemp")
    # pytest makes the directory when a test asks for it.
    basetemp.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    factory._basetemp, factory._given_basetemp = None, basetemp


def leave_to_parent(config: pytest.Config) -> LogTerminal:
    """Remove what writes for the whole session or stop it; return the new terminal reporter."""
    manager = config.pluginmanager
    for name in _PARENTS_PLUGINS:
        if manager.has_plugin(name):
            manager.unregister(name=name)
    for plugin in list(manager.get_plugins()):
        if type(plugin).__name__ in _PARENTS_CLASSES:
            manager.unregister(plugin)
    for name in logging.root.manager.loggerDict:
        # torch logs every c10d call and each step of its compiler at DEBUG there, which floods a
        # failing test's captured log.
        if name.startswith(("c10d", "torch.__trace")):
            logging.getLogger(name).setLevel(logging.WARNING)
    # With -x, a rank that failed would end fixtures alone which other ranks keep.
    config.option.maxfail = 0
    terminal = LogTerminal()
    manager.register(terminal, "terminalreporter")
    handler = live_log_handler(config)
    if handler is not None:
        handler.stream = terminal
    return terminal


def live_log_handler(config: pytest.Config) -> Any:
    """What shows logs on the terminal under ``log_cli``; None if nothing does."""
    handler = getattr(config.pluginmanager.get_plugin("logging-plugin"), "log_cli_handler", None)
    return handler if isinstance(handler, logging.StreamHandler) else None


def capture_manager(config: pytest.Config) -> Any:
    """Pytest's capture; None under ``-p no:capture``."""
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    if manager is not None:
        require(manager, "CaptureManager", "_global_capturing", "_method")
    return manager


def require(owner: object, what: str, *names: str) -> None:
    """Raise an error if a private name of pytest has moved: Note [Private names of pytest]."""
    if not all(hasattr(owner, name) for name in names):
        moved = f"{what}.{', .'.join(names)}"
        raise upstream.moved_error("pytest", moved, "running ranks relies on")


def resolve_basetemp(config: pytest.Config) -> Path:
    """The session's directory for temporary directories; the system's under ``-p no:tmpdir``."""
    if not config.pluginmanager.has_plugin("tmpdir"):
        return Path(tempfile.gettempdir())
    require(config, "config", "_tmp_path_factory")
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]  # see above
    path: Path = factory.getbasetemp()
    return path


_TERMINAL = pytest.StashKey[Any]()


def hold_terminal(config: pytest.Config) -> None:
    """Keep from the terminal what pytest writes there from now on."""
    if config.pluginmanager.has_plugin("terminalreporter"):
        writer: Any = config.get_terminal_writer()
        require(writer, "TerminalWriter", "_file")
        config.stash[_TERMINAL], writer._file = writer._file, io.StringIO()


def release_terminal(config: pytest.Config) -> None:
    """Write what was held back, if anything was, and hold nothing back from now on."""
    if _TERMINAL in config.stash:
        writer: Any = config.get_terminal_writer()
        terminal = config.stash[_TERMINAL]
        terminal.write(writer._file.getvalue())
        terminal.flush()
        writer._file = terminal
