"""Configure Sphinx, which `nox -s docs` runs."""

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

# Create the anchors that GitHub creates, so that links to headings work in both.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
python_display_short_literal_types = True
python_use_unqualified_type_names = True
FIXTURE_CLASSES = ("CommMode", "CommSnapshot", "DistInfo", "MakeDeviceMesh", "TreeFactory")
"""Classes that only fixtures construct: the reference omits their constructor arguments."""

nitpicky = True
# Types of torch, pytest, syrupy and Python: resolving them needs the network.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|optim|os|collections)\..*"),
    ("py:.*", r"(DeviceMesh|TextIO|TracebackType|WrapExpectation)"),
    ("py:class", r"Subject"),  # an alias without a page
]

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}
pygments_style = "friendly"
pygments_dark_style = "monokai"

linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]
# Publishers reject programs.
linkcheck_ignore = [rf"{REPOSITORY}.*", r"https://doi\.org/.*"]


def link_outside_the_site(app: Sphinx, page: str, source: list[str]) -> None:
    """Point links to files outside of docs/ to the repository."""
    source[0] = re.sub(
        r"\]\((?:\.\./)+((?:\.github|benchmarks|examples|tests|snapshots|[A-Z]+\.md)[^)]*)\)",
        rf"]({REPOSITORY}blob/main/\1)",
        source[0],
    )


def read_google_style(
    app: Sphinx, kind: str, name: str, documented: object, options: object, lines: list[str]
) -> None:
    """Parse the sections of a docstring.

    ``sphinx.ext.napoleon`` would read words before a colon in an attribute's docstring as a type.
    """
    is_value = kind in {"attribute", "property"}
    parsed = GoogleDocstring(lines, what="method" if is_value else kind, name=name)
    lines[:] = parsed.lines()


def hide_constructor(app: Sphinx, kind: str, name: str, *event: object) -> tuple[str, str] | None:
    """Omit the constructor arguments of `FIXTURE_CLASSES`."""
    return ("", "") if name in {f"pytest_fsdp_comm.{cls}" for cls in FIXTURE_CLASSES} else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the functions of this file with Sphinx."""
    app.connect("source-read", link_outside_the_site)
    app.connect("autodoc-process-docstring", read_google_style)
    app.connect("autodoc-process-signature", hide_constructor)
    return {"parallel_read_safe": True}
