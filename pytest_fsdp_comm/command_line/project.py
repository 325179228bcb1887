"""Where a project keeps its snapshots, read from pytest's settings without pytest."""

from __future__ import annotations

import configparser
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.errors import FsdpCommError

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEFAULT: Final = "snapshots"
_FILES: Final = (
    *("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"),
    *("pyproject.toml", "tox.ini", "setup.cfg"),
)
"""In pytest's order (9.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """What pytest's settings say about snapshots."""

    root: Path
    snapshot_dir: Path
    """Of ini ``fsdp_comm_snapshot_dir``; absolute."""


# Note [Settings without pytest]: importing pytest takes longer than most commands run, so its rules
# are repeated here (9.2): which files hold settings, in which order, and which of them make their
# directory the root even if they are empty. Options of the command line are not there to be known.


def find_project(start: Path) -> Project:
    """Read the settings of the project that an absolute directory is in."""
    for directory in (start, *start.parents):
        for file in map(directory.joinpath, _FILES):
            settings = _read_settings(file) if file.is_file() else None
            if settings is not None:
                return _project(directory, settings)
    # As pytest, which takes the directory itself if there are no settings above it.
    return Project(root=start, snapshot_dir=start / _DEFAULT)


def _project(root: Path, settings: Mapping[str, Any]) -> Project:
    given = settings.get("fsdp_comm_snapshot_dir") or _DEFAULT
    snapshot_dir = Path(os.path.normpath(root / str(given).strip()))
    return Project(root=root, snapshot_dir=snapshot_dir)


def _read_settings(file: Path) -> Mapping[str, Any] | None:
    """Pytest's settings; None if a file has none, and its directory is no root for it."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            table: dict[str, Any] = tomllib.loads(text)
            if file.name != "pyproject.toml":
                return table.get("pytest", {})  # type: ignore[no-any-return]  # of any TOML file
            of_tool = table.get("tool", {}).get("pytest")
            # Either table has the options: the new one itself, the old one below ``ini_options``.
            return None if of_tool is None else of_tool.get("ini_options", of_tool)
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        parser.read_string(text)
    except (OSError, ValueError, configparser.Error) as problem:
        raise FsdpCommError(f"{file} cannot be read: {problem}") from None
    section = "tool:pytest" if file.name == "setup.cfg" else "pytest"
    if parser.has_section(section):
        return dict(parser[section])
    # pytest.ini makes its directory the root even if it is empty.
    return {} if file.name.endswith("pytest.ini") else None
