"""Which commit a run is of, and where its hosting service shows it, as CI's variables say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What is not known is empty."""

    commit: str = ""
    branch: str = ""
    address: str = ""
    """Of the repository's pages."""
    top: str = ""
    """Directory of the checkout."""

    @property
    def commit_address(self) -> str:
        """Where the commit is shown."""
        return f"{self.address}/commit/{quote(self.commit)}" if self.address else ""

    @property
    def source(self) -> str:
        """Where the commit's files are shown: a path follows."""
        return f"{self.address}/blob/{quote(self.commit)}" if self.address else ""

    def line_address(self, path: str, line: int) -> str:
        """Where a line of a file is shown, whose path is relative to the top of the checkout."""
        return f"{self.source}/{quote(path)}#L{line}" if self.source else ""


def read_origin(environment: Mapping[str, str]) -> Origin:
    """Read what GitHub, or GitLab, sets."""

    def first(*names: str) -> str:
        return next((environment[name] for name in names if environment.get(name)), "")

    server, repository = first("GITHUB_SERVER_URL"), first("GITHUB_REPOSITORY")
    project, commit = first("CI_PROJECT_URL"), first("GITHUB_SHA", "CI_COMMIT_SHA")
    address = f"{server}/{repository}" if server and repository else project and f"{project}/-"
    return Origin(
        commit=commit,
        branch=first("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME"),
        # Anything else would be a link that runs.
        address=address if commit and address.startswith(("https://", "http://")) else "",
        top=first("GITHUB_WORKSPACE", "CI_PROJECT_DIR"),
    )
