"""Render the pages of the HTML report."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.comm.cost import cost_of_change
from pytest_fsdp_comm.comm.profile import CommProfile, make_comparable
from pytest_fsdp_comm.errors import FsdpCommError, printable
from pytest_fsdp_comm.reports.explanation import (
    BREAKS,
    Failure,
    failure_sort_key,
    summarize_changes,
)
from pytest_fsdp_comm.reports.html.tables import (
    MARKS,
    CostRow,
    cost_rows,
    differing_modules,
    module_table,
    side_rows,
    total_cost_rows,
)
from pytest_fsdp_comm.reports.html.values import Compared, Entry, Result, Run
from pytest_fsdp_comm.reports.trees import (
    mark,
    parameter_words,
    placement_words,
    policy_words,
    relation_words,
    summary_words,
    tree_rows,
)
from pytest_fsdp_comm.text.fqn import name_owners
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import shorten_line, show_nbytes
from pytest_fsdp_comm.tree.model import ShardTree
from pytest_fsdp_comm.tree.profile import TreeProfile

if TYPE_CHECKING:
    from jinja2 import Environment

# Size limits of a page. A page that omits elements says how many.
_MAX_CHARTS: Final = 4
_MAX_SECTIONS: Final = 12
_MAX_TESTS: Final = 1_500
_MAX_TREE_ROWS: Final = 2_500
_MAX_SECTION_ROWS: Final = 600  # for a tree on a page that also shows recordings
_MAX_SLUG: Final = 60
_MAX_CHANGES: Final = 6
_MAX_CELL: Final = 200
_FILE_PART: Final = re.compile(r"\.ws\d+\.(.+)\.comm$")
_MADE_WITH: Final = re.compile(r"#[^\n|]*\| ([^\n]*) \(not compared\)")
_MAX_ROWS: Final = 300
# Deeper levels are not indented further, because the style sheet has no classes for them.
_MAX_DEPTH: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How the report shows the result of a comparison or a test."""

    rank: int
    """Sort key in the index, which lists the worst results first."""
    sign: str
    word: str
    tone: str
    """The CSS class: ``bad``, ``note``, ``good`` or ``dim``."""


_STATUS: Final = {
    "differs": Status(rank=0, sign="≠", word="differs", tone="bad"),
    "broken": Status(rank=1, sign="!", word="not make_comparable", tone="bad"),
    "missing": Status(rank=2, sign="?", word="no snapshot", tone="bad"),
    "failed": Status(rank=3, sign="✕", word="failed", tone="bad"),
    "error": Status(rank=3, sign="✕", word="error", tone="bad"),
    "unfinished": Status(rank=4, sign="…", word="not finished", tone="note"),
    "updated": Status(rank=5, sign="✎", word="snapshot written", tone="note"),
    "same": Status(rank=6, sign="=", word="matches snapshot", tone="good"),
    "uncompared": Status(rank=7, sign="·", word="not compared", tone="dim"),
    "passed": Status(rank=7, sign="·", word="not compared", tone="dim"),
    "xfailed": Status(rank=7, sign="~", word="expected failure", tone="dim"),
    "skipped": Status(rank=8, sign="/", word="skipped", tone="dim"),
}


def status_of(result: Result) -> Status:
    """Return the worst status of a test's comparisons and outcome; ``xfailed`` takes precedence."""
    if result.outcome == "xfailed":
        return _STATUS["xfailed"]
    statuses = [_STATUS[compared.verdict] for compared in result.record.compared]
    if result.outcome != "passed" or not statuses:
        statuses.append(_STATUS[result.outcome])
    return min(statuses, key=lambda status: status.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TestRow:
    status: Status
    page: str
    name: str
    path: str
    failure: Failure | None
    """The worst failed comparison; None if none failed."""
    changes: tuple[str, ...]
    """What changed, worst first; if nothing was compared, why the test failed."""
    seconds: float
    """Duration of setup, call and teardown."""
    costs: list[CostRow]
    """The rows of the total bytes and of the peak; empty if nothing was recorded."""


def render_pages(
    run: Run, read: Callable[[str], CommProfile | TreeProfile]
) -> Iterator[tuple[str, str]]:
    """Yield the path and content of each page: one page per test, then the index."""
    rows = []
    for result in run.tests:
        test = _make_test_data("", result, read)
        rows.append(test["row"])
        data = _write_timelines_json(test["sections"])
        yield f"tests/{test['row'].page}", _render_template("test.html.jinja", test=test, data=data)
    yield "index.html", _render_index(run, sorted(rows, key=_row_sort_key))


def render_single_page(run: Run, read: Callable[[str], CommProfile | TreeProfile]) -> str:
    """Return one page that contains the index and all tests."""
    tests = [
        _make_test_data(f"t{number}-", result, read) for number, result in enumerate(run.tests)
    ]
    tests.sort(key=lambda test: _row_sort_key(test["row"]))
    return _render_index(run, [test["row"] for test in tests], tests[:_MAX_TESTS])


def _row_sort_key(row: _TestRow) -> tuple[int, int]:
    # A change that breaks training comes first, even if it has been accepted.
    return failure_sort_key(row.failure), row.status.rank


def _render_index(run: Run, rows: Sequence[_TestRow], tests: Sequence[dict[str, Any]] = ()) -> str:
    severities = [row.failure.severity for row in rows if row.failure]
    return _render_template(
        "index.html.jinja",
        run=run,
        rows=rows[:_MAX_TESTS],
        left_out=max(0, len(rows) - _MAX_TESTS),
        counts=Counter(row.status for row in rows),
        severities=[*dict.fromkeys(severities)],
        tests=tests,
        data=_write_timelines_json([section for test in tests for section in test["sections"]]),
    )


def _make_test_row(result: Result, sections: Sequence[dict[str, Any]]) -> _TestRow:
    path, _, name = result.nodeid.partition("::")
    # The sections are sorted, so a recording that differs comes first.
    cost = next((section["cost"] for section in sections if section["cost"]), None)
    failures = [value.failure for value in result.record.compared if value.failure]
    failure = min(failures, key=failure_sort_key, default=None)
    lines = summarize_changes(failure) if failure else ()
    # If nothing was compared, the reason may be another rank's error, which pytest reports.
    if failure is None or not (failure.changes or failure.is_missing):
        lines = tuple(result.message.splitlines()) or lines
    return _TestRow(
        status=status_of(result),
        page=page_name(result.nodeid),
        name=name or path,
        path=path,
        failure=failure,
        # A badge shows the severity.
        changes=tuple(
            shorten_line(line.removeprefix(BREAKS), _MAX_CELL) for line in lines[:_MAX_CHANGES]
        ),
        seconds=result.seconds,
        # A test that failed before its first call has not recorded a step of 0 bytes.
        costs=total_cost_rows(cost) if cost and (cost.collectives or not result.message) else [],
    )


def _make_test_data(
    prefix: str, result: Result, read: Callable[[str], CommProfile | TreeProfile]
) -> dict[str, Any]:
    """Return the template's data about a test, whose HTML ids begin with `prefix`."""
    sections = [
        _make_section_data(f"{prefix}v{number}", compared, read)
        for number, compared in enumerate(result.record.compared)
    ]
    sections.sort(key=lambda section: section["status"].rank)
    rendered = sections[:_MAX_SECTIONS]
    return {
        "id": prefix,
        "result": result,
        "row": _make_test_row(result, sections),
        "sections": rendered,
        "left_out": len(sections) - len(rendered),
        # Prefer the recorded world size: a test without ranks may create a process group.
        "world_size": max((section["world_size"] for section in rendered), default=0)
        or result.record.world_size,
    }


def _make_section_data(
    prefix: str, value: Compared, read: Callable[[str], CommProfile | TreeProfile]
) -> dict[str, Any]:
    """Return the template's data about a value, whose HTML ids begin with `prefix`."""

    def read_profile(text: str) -> CommProfile | TreeProfile | None:
        try:
            return read(text) if text else None
        except FsdpCommError:
            return None

    old, new = read_profile(value.old), read_profile(value.new)
    named, made_with = _FILE_PART.search(value.file), _MADE_WITH.match(value.new)
    part = named[1] if named else value.name
    timelines = [timeline for timeline in value.timelines if timeline.order]
    section: dict[str, Any] = {
        "id": prefix,
        "title": ("Sharding" if value.kind == "tree" else "Communication")
        + (f": {part}" if part not in {"", "comm", "tree"} else ""),
        "value": value,
        "status": _STATUS[value.verdict],
        "has_old": old is not None,
        "made_with": made_with[1] if made_with else "",
        "world_size": new.world_size if new else 0,
        "rows": [],
        "cost": None,
        "tree": _make_tree_data(value.tree, _MAX_SECTION_ROWS) if value.tree else None,
        "timelines": timelines[:_MAX_CHARTS],
        "undrawn": [rank for timeline in timelines[_MAX_CHARTS:] for rank in timeline.ranks],
    }
    if isinstance(new, CommProfile):
        # Without a snapshot, compare the recording with itself.
        snapshot = old if isinstance(old, CommProfile) else new
        sides = make_comparable(snapshot, new)
        section |= {
            "rows": side_rows(*sides, snapshot),
            "cost": cost_of_change(*sides),
            "modules": module_table(*sides),
        }
    section["differing"] = differing_modules(section["rows"])
    return section


def render_tree_page(tree: ShardTree) -> str:
    """Render a page about one tree."""
    return _render_template("tree.html.jinja", view=_make_tree_data(tree, _MAX_TREE_ROWS))


def _make_tree_data(tree: ShardTree, most: int) -> dict[str, Any]:
    """Return the template's data about a tree, with up to `most` rows."""
    rows = list(tree_rows(tree))
    return {
        "title": tree.modules[0].class_name,
        "summary": summary_words(tree),
        "rows": rows[:most],
        "left_out": len(rows) - most,
        "findings": tree.findings,
        "notes": tree.notes,
    }


def page_name(nodeid: str) -> str:
    """Return a file name for a test's page that is unique, and the same in every run."""
    path, _, name = nodeid.partition("::")
    module = path.rpartition("/")[2].removesuffix(".py")
    slug = re.sub(r"[^A-Za-z0-9]+", "-", f"{module}-{name}")[:_MAX_SLUG].strip("-")
    digest = hashlib.sha256(nodeid.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{slug}-{digest}.html"


def _write_timelines_json(sections: Sequence[dict[str, Any]]) -> str:
    """Return the JSON from which `report.js` draws timelines."""
    # One step of a 126-layer model has thousands of entries, so the JSON has each distinct entry
    # once, and a list of indices for each timeline. The script computes positions, intervals from
    # unshard to reshard, and gathered bytes. The templates also list the entries, for browsers that
    # do not run scripts.
    entries: dict[tuple[str | int | None, ...], int] = {}

    def number_entry(entry: Entry) -> int:
        overlap = (entry.overlap,) if entry.overlap else ()
        values = (entry.operation, entry.module, entry.phase, entry.axis, entry.nbytes, *overlap)
        return entries.setdefault(values, len(entries))

    drawn = {}
    for section in sections:
        timelines = []
        for timeline in section["timelines"]:
            numbers = [number_entry(entry) for entry in timeline.entries]
            order = [numbers[index] for index in timeline.order]
            timelines.append({"order": order, "peak": timeline.peak, "left_out": timeline.left_out})
        differing = sorted(section["differing"], key=str)
        drawn[section["id"]] = {"differing": differing, "timelines": timelines}
    text = json.dumps({"entries": [*entries], "sections": drawn}, separators=(",", ":"))
    # See Note [Safe pages].
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


# Note [Safe pages]
# Names of tests, modules and axes are arbitrary text. jinja escapes them (`autoescape`),
# `_make_printable` escapes control characters, and the JSON has no "<", which could end its
# element. In addition, the page's content security policy forbids loading anything, and allows only
# the style sheet and script whose digests it lists. It also forbids style attributes, so the script
# positions elements through their style properties, which the policy allows.


def _render_template(template: str, **values: Any) -> str:
    text = _make_jinja_environment().get_template(template).render(**values)
    # A test's id may contain a lone surrogate, which UTF-8 cannot encode.
    return text.encode("utf-8", "replace").decode("utf-8")


@functools.cache
def _make_jinja_environment() -> Environment:
    from jinja2 import (  # noqa: PLC0415  # needed only to render a page
        Environment,
        PackageLoader,
        StrictUndefined,
    )

    environment = Environment(
        loader=PackageLoader("pytest_fsdp_comm.reports.html"),
        autoescape=True,
        finalize=_make_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    words = (mark, parameter_words, placement_words, policy_words, relation_words, show_nbytes)
    filters = (*words, make_breakable, cost_rows, name_owners, name_ranks)
    environment.filters.update({function.__name__: function for function in filters})
    style, script = _read_asset("report.css"), _read_asset("report.js")
    environment.globals.update(
        marks=MARKS,
        max_rows=_MAX_ROWS,
        max_depth=_MAX_DEPTH,
        style=style,
        script=script,
        policy=(
            f"default-src 'none'; style-src '{_make_csp_hash(style)}'; "
            f"script-src '{_make_csp_hash(script)}'; base-uri 'none'; form-action 'none'"
        ),
    )
    return environment


def make_breakable(text: str) -> Any:
    """Escape an id, and allow line breaks after its separators."""
    from markupsafe import Markup, escape  # noqa: PLC0415  # installed with jinja2

    parts = re.split(r"(?<=[/_.:,\[{-])(?=[^:])", _make_printable(text))
    return Markup("<wbr>").join(map(escape, parts))


def _make_printable(value: Any) -> Any:
    # Trust Markup: only this module creates it, and only from printable text.
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return printable(value, "\n\t") if is_text else value


def _read_asset(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")


def _make_csp_hash(text: str) -> str:
    """Return a text's digest as the page's policy lists it (see Note [Safe pages])."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
