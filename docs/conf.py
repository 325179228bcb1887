"""How Sphinx builds the site: `nox -s docs`."""

from __future__ import annotations

import re
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Any

from sphinx.ext.napoleon.docstring import GoogleDocstring

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "pytest-fsdp-comm"
author = "The pytest-fsdp-comm maintainers"
project_copyright = author
version = release = installed_version(project)

REPOSITORY = "https://github.com/pytest-fsdp-comm/pytest-fsdp-comm/"

extensions = ["myst_parser", "sphinx.ext.autodoc"]

# Links between pages lead to headings by the anchors that GitHub gives them.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
python_display_short_literal_types = True
python_use_unqualified_type_names = True
MADE_BY_FIXTURES = ("CommMode", "CommSnapshot", "DistInfo", "MakeDeviceMesh", "TreeFactory")
"""Classes that no test makes, so that the reference leaves out how."""

nitpicky = True
# Types of torch, pytest, syrupy and Python: links to them would need the network.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|optim|os|collections)\..*"),
    ("py:.*", r"(DeviceMesh|TextIO|TracebackType|WrapExpectation)"),
    ("py:class", r"Subject"),  # an alias, which Sphinx knows no page of
]

html_theme = "furo"
html_title = project
html_static_path: list[str] = []
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}
pygments_style = "friendly"
pygments_dark_style = "monokai"

linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]
# Publishers refuse programs.
linkcheck_ignore = [rf"{REPOSITORY}.*", r"https://doi\.org/.*"]


def link_outside_the_site(app: Sphinx, page: str, source: list[str]) -> None:
    """Has links to files of the repository that are no pages lead to the repository."""
    source[0] = re.sub(
        r"\]\((?:\.\./)+((?:\.github|benchmarks|examples|tests|snapshots|[A-Z]+\.md)[^)]*)\)",
        rf"]({REPOSITORY}blob/main/\1)",
        source[0],
    )


def read_google_style(
    app: Sphinx, what: str, name: str, documented: object, options: object, lines: list[str]
) -> None:
    """Reads the sections of a docstring, as ``sphinx.ext.napoleon`` would.

    That one takes the words before a colon in an attribute's docstring for its type.
    """
    is_value = what in {"attribute", "property"}
    parsed = GoogleDocstring(lines, what="method" if is_value else what, name=name)
    lines[:] = parsed.lines()


def hide_constructor(app: Sphinx, what: str, name: str, *others: object) -> tuple[str, str] | None:
    """Leaves out the arguments with which fixtures are made."""
    return ("", "") if name in {f"pytest_fsdp_comm.{made}" for made in MADE_BY_FIXTURES} else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers what this file adds to Sphinx."""
    app.connect("source-read", link_outside_the_site)
    app.connect("autodoc-process-docstring", read_google_style)
    app.connect("autodoc-process-signature", hide_constructor)
    return {"parallel_read_safe": True}
