"""Keeps pytest in a rank from using the terminal, files and plugins of its parent process."""

from __future__ import annotations

import io
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from _pytest._io import TerminalWriter

from pytest_fsdp_comm import upstream

# Note [Private names of pytest]: this module and `debugger` use private names of pytest 8.4 to 9.2.
# tests/unit/ranks/test_isolation.py has a contract test for each.

# Plugins that ranks unregister, because only the parent may write to the terminal, to report files,
# to caches and to xdist's channel.
_PARENTS_PLUGINS = (
    "terminalreporter",
    "lfplugin",
    "nfplugin",
    "stepwiseplugin",
    "pastebin",
    # If one rank reran a test alone, it would hang in its first collective; see `session.reruns`.
    "rerunfailures",
    "fsdp-comm-ci",
    # pytest-github-actions-annotate-failures 0.4 would annotate the reports of each rank.
    "annotate_errors",
    "annotate_warnings",
    # pytest-forked would fork the rank for each test, although the rank is already a new process.
    "pytest_forked",
)
_PARENTS_CLASSES = ("LogXML", "WorkerInteractor", "DSession", "Reporter")

_PARENTS_CAPTURE = pytest.StashKey[object]()


class LogTerminal:
    """The terminal reporter of a rank; writes live logs and ``--setup-show`` output to a file."""

    def __init__(self) -> None:
        self._tw = TerminalWriter(io.StringIO())

    def open(self, path: Path) -> None:
        # Do not write to the rank's stdout, because a test may capture that with capfd.
        self._tw = TerminalWriter(path.open("a", buffering=1, encoding="utf-8"))

    # Drop the empty line and the title that pytest writes before live logs. They are not needed,
    # because each line is printed with its rank.
    def write(self, text: str) -> None:
        if text.strip():
            self._tw.write(text)

    def section(self, *_: object, **__: object) -> None:
        pass


def isolate_session(config: pytest.Config, *, basetemp: Path) -> None:
    """Disable pytest's capture in a rank, and use `basetemp` for its temporary directories."""
    # The parent captures output in temporary files, which a forked rank inherits. The rank must not
    # write to them; it writes to its logs instead.
    manager = capture_manager(config)
    if manager is not None:
        # Keep the files alive: freeing unclosed files would warn, and -W error makes that an error.
        config.stash[_PARENTS_CAPTURE] = manager._global_capturing
        # Do not call stop_global_capturing(): it would print what the parent has captured so far.
        manager._global_capturing = None
        manager._method = "no"
        manager.start_global_capturing()
    factory: Any = getattr(config, "_tmp_path_factory", None)
    if factory is None:
        return
    require_private_names(factory, "TempPathFactory", "_basetemp", "_given_basetemp")
    # pytest creates `basetemp` when a test first needs it, but does not create its parent.
    basetemp.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    factory._basetemp, factory._given_basetemp = None, basetemp


def unregister_parents_plugins(config: pytest.Config) -> LogTerminal:
    """Unregister plugins that only the parent may run; return the rank's terminal reporter."""
    manager = config.pluginmanager
    for name in _PARENTS_PLUGINS:
        if manager.has_plugin(name):
            manager.unregister(name=name)
    for plugin in list(manager.get_plugins()):
        if type(plugin).__name__ in _PARENTS_CLASSES:
            manager.unregister(plugin)
    for name in logging.root.manager.loggerDict:
        # torch logs every c10d call and each compiler step to these loggers at DEBUG, which would
        # flood the captured log of a failing test.
        if name.startswith(("c10d", "torch.__trace")):
            logging.getLogger(name).setLevel(logging.WARNING)
    # Ignore -x, because a failed rank would tear down fixtures that the other ranks keep.
    config.option.maxfail = 0
    terminal = LogTerminal()
    manager.register(terminal, "terminalreporter")
    handler = live_log_handler(config)
    if handler is not None:
        handler.stream = terminal
    return terminal


def live_log_handler(config: pytest.Config) -> Any:
    """Return the handler that prints live logs (``log_cli``); None if they are off."""
    handler = getattr(config.pluginmanager.get_plugin("logging-plugin"), "log_cli_handler", None)
    return handler if isinstance(handler, logging.StreamHandler) else None


def capture_manager(config: pytest.Config) -> Any:
    """Return pytest's capture manager; None under ``-p no:capture``."""
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    if manager is not None:
        require_private_names(manager, "CaptureManager", "_global_capturing", "_method")
    return manager


def require_private_names(owner: object, what: str, *names: str) -> None:
    """Raise an error if `owner` lacks a private name: see Note [Private names of pytest]."""
    if not all(hasattr(owner, name) for name in names):
        moved = f"{what}.{', .'.join(names)}"
        raise upstream.moved_error("pytest", moved, "running ranks relies on")


def resolve_basetemp(config: pytest.Config) -> Path:
    """Return pytest's base temporary directory, or the system's under ``-p no:tmpdir``."""
    if not config.pluginmanager.has_plugin("tmpdir"):
        return Path(tempfile.gettempdir())
    require_private_names(config, "config", "_tmp_path_factory")
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]  # see above
    path: Path = factory.getbasetemp()
    return path


_TERMINAL = pytest.StashKey[Any]()


def hold_terminal(config: pytest.Config) -> None:
    """Buffer everything that pytest writes to the terminal, until `release_terminal`."""
    if config.pluginmanager.has_plugin("terminalreporter"):
        writer: Any = config.get_terminal_writer()
        require_private_names(writer, "TerminalWriter", "_file")
        config.stash[_TERMINAL], writer._file = writer._file, io.StringIO()


def release_terminal(config: pytest.Config) -> None:
    """Write the buffered output to the terminal, and stop buffering."""
    if _TERMINAL in config.stash:
        writer: Any = config.get_terminal_writer()
        terminal = config.stash[_TERMINAL]
        terminal.write(writer._file.getvalue())
        terminal.flush()
        writer._file = terminal
