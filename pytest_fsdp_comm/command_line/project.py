"""Where a project keeps its snapshots, read from pytest's settings without pytest."""

from __future__ import annotations

import configparser
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.comm.links import Links, parse_links
from pytest_fsdp_comm.command_line.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DEFAULT: Final = "snapshots"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """What pytest's settings say about snapshots."""

    root: Path
    """The directory that pytest takes for the root directory."""
    snapshot_dir: Path
    """Of ini ``fsdp_comm_snapshot_dir``; absolute."""
    links: Links = field(default_factory=Links)
    """Of ini ``fsdp_comm_links``."""


def find_project(start: Path) -> Project:
    """Reads the settings of the project that a directory is in.

    Args:
        start: Absolute; usually the working directory.

    Raises:
        CommandError: A file of settings cannot be read.
    """
    for directory in (start, *start.parents):
        for name, read in _READERS.items():
            file = directory / name
            settings = read(file) if file.is_file() else None
            if settings is not None:
                return _project(directory, file, settings)
    # As pytest, which takes the directory itself if there are no settings above it.
    return Project(root=start, snapshot_dir=start / _DEFAULT)


def _project(root: Path, file: Path, settings: Mapping[str, Any]) -> Project:
    given = settings.get("fsdp_comm_snapshot_dir") or _DEFAULT
    lines = settings.get("fsdp_comm_links") or ()
    try:
        links = parse_links(lines.splitlines() if isinstance(lines, str) else map(str, lines))
    except ValueError as problem:
        raise CommandError(f"{file}: {problem}") from None
    snapshot_dir = Path(os.path.normpath(root / str(given).strip()))
    return Project(root=root, snapshot_dir=snapshot_dir, links=links)


def _read_toml(file: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise CommandError(f"{file} cannot be read: {problem}") from None


def _read_own_toml(file: Path) -> Mapping[str, Any] | None:
    return _read_toml(file).get("pytest", {})  # type: ignore[no-any-return]  # of any TOML file


def _read_pyproject(file: Path) -> Mapping[str, Any] | None:
    table: Any = _read_toml(file).get("tool", {}).get("pytest")
    # Either table has the options: the new one itself, the old one below ``ini_options``.
    return None if table is None else table.get("ini_options", table)


def _ini_reader(section: str, *, is_own: bool) -> Callable[[Path], Mapping[str, Any] | None]:
    def read(file: Path) -> Mapping[str, Any] | None:
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read_string(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, configparser.Error) as problem:
            raise CommandError(f"{file} cannot be read: {problem}") from None
        # pytest.ini makes its directory the root even if it is empty.
        empty: Mapping[str, Any] | None = {} if is_own else None
        return dict(parser[section]) if parser.has_section(section) else empty

    return read


_READERS: Final[Mapping[str, Callable[[Path], Mapping[str, Any] | None]]] = {
    "pytest.toml": _read_own_toml,
    ".pytest.toml": _read_own_toml,
    "pytest.ini": _ini_reader("pytest", is_own=True),
    ".pytest.ini": _ini_reader("pytest", is_own=True),
    "pyproject.toml": _read_pyproject,
    "tox.ini": _ini_reader("pytest", is_own=False),
    "setup.cfg": _ini_reader("tool:pytest", is_own=False),
}
"""In pytest's order (9.2)."""
