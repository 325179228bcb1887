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
from pytest_fsdp_comm.comm.profile import CommProfile, comparable
from pytest_fsdp_comm.errors import FsdpCommError, printable
from pytest_fsdp_comm.reports.html.tables import (
    MARKS,
    CostRow,
    cost_rows,
    differing_modules,
    module_table,
    side_rows,
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
from pytest_fsdp_comm.text.words import counted, shorten, show_nbytes
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
_MAX_HEADLINE: Final = 160
_MAX_HEADLINES: Final = 6
# Matches a list of several modules, as `fqn.name_owners` formats it.
_NAMES: Final = r"[^\s,]+(?:, [^\s,]+)+(?: and \d+ more)?"
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
    "broken": Status(rank=1, sign="!", word="not comparable", tone="bad"),
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
    headline: str
    site: str
    """The line that issued the new calls; empty if unknown."""
    costs: list[CostRow]
    """The rows of the total bytes and of the peak; empty if nothing was recorded."""


def render_pages(
    run: Run, read: Callable[[str], CommProfile | TreeProfile]
) -> Iterator[tuple[str, str]]:
    """Yield the path and content of each page: one page per test, then the index."""
    rows = []
    for result in run.tests:
        sections = [
            _section(f"v{number}", compared, read)
            for number, compared in enumerate(result.record.compared)
        ]
        row = _test_row(result, sections)
        rows.append(row)
        yield f"tests/{row.page}", _test_page(result, row, sections)
    yield "index.html", _index_page(run, sorted(rows, key=lambda row: row.status.rank))


def _index_page(run: Run, rows: Sequence[_TestRow]) -> str:
    return _render(
        "index.html.jinja",
        run=run,
        rows=rows[:_MAX_TESTS],
        left_out=max(0, len(rows) - _MAX_TESTS),
        counts=Counter(row.status for row in rows),
    )


def _test_row(result: Result, sections: Sequence[dict[str, Any]]) -> _TestRow:
    path, _, name = result.nodeid.partition("::")
    headlines = [value.headline for value in result.record.compared if value.headline]
    cost = next((section["cost"] for section in sections if section["cost"]), None)
    texts = [value.text for value in result.record.compared if value.text]
    sites = [*dict.fromkeys(site for text in texts for site, _ in text.sent)]
    more = f" and {counted(len(sites) - 1, 'more line')}" if len(sites) > 1 else ""
    return _TestRow(
        status=status_of(result),
        page=page_name(result.nodeid),
        name=name or path,
        path=path,
        headline=_cut(headlines[0] if headlines else result.message),
        site=f"issued at {sites[0]}{more}" if sites else "",
        costs=cost_rows(cost)[-2:] if cost else [],
    )


def _test_page(result: Result, row: _TestRow, sections: Sequence[dict[str, Any]]) -> str:
    rendered = sections[:_MAX_SECTIONS]
    return _render(
        "test.html.jinja",
        result=result,
        row=row,
        sections=rendered,
        data=_data(rendered),
        left_out=len(sections) - len(rendered),
        # Prefer the recorded world size: a test without ranks may create a process group.
        world_size=max((section["world_size"] for section in rendered), default=0)
        or result.record.world_size,
    )


def _section(
    prefix: str, value: Compared, read: Callable[[str], CommProfile | TreeProfile]
) -> dict[str, Any]:
    """Return the template's data about a value, whose HTML ids begin with `prefix`."""

    def profile(text: str) -> CommProfile | TreeProfile | None:
        try:
            return read(text) if text else None
        except FsdpCommError:
            return None

    old, new = profile(value.old), profile(value.new)
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
        "tree": _tree_view(value.tree, _MAX_SECTION_ROWS) if value.tree else None,
        "timelines": timelines[:_MAX_CHARTS],
        "undrawn": [rank for timeline in timelines[_MAX_CHARTS:] for rank in timeline.ranks],
    }
    if isinstance(new, CommProfile):
        # Without a snapshot, compare the recording with itself.
        sides = comparable(old if isinstance(old, CommProfile) else new, new)
        section |= {
            "rows": side_rows(*sides),
            "cost": cost_of_change(*sides),
            "modules": module_table(*sides),
        }
    section["differing"] = differing_modules(section["rows"])
    return section


def tree_page(tree: ShardTree) -> str:
    """Render a page about one tree."""
    return _render("tree.html.jinja", view=_tree_view(tree, _MAX_TREE_ROWS))


def _tree_view(tree: ShardTree, most: int) -> dict[str, Any]:
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


def _cut(text: str) -> str:
    """Limit the number and length of a headline's lines, so that it fits into the table."""
    first = text.splitlines()[:_MAX_HEADLINES]
    return "\n".join(shorten(_with_change_first(line), _MAX_HEADLINE) for line in first)


def _with_change_first(line: str) -> str:
    """Move the module names in a long line to its end, or shorten them to ``a and 2 more``."""
    if len(line) <= _MAX_HEADLINE:
        return line
    if match := re.fullmatch(
        rf"((?:modules )?{_NAMES}(?: (?:in|outside) [a-z ]+)?(?:, each)?): (.+)", line
    ):
        return f"{match[2]}; {match[1]}"

    def first_name(match: re.Match[str]) -> str:
        more = int(re.sub(r".* and (\d+) more$|.*", r"\1", match[0]) or 0)
        return f"{match[0].partition(',')[0]} and {match[0].count(',') + more} more"

    return re.sub(rf"^{_NAMES}|(?<=of ){_NAMES}", first_name, line, count=1)


def _data(sections: Sequence[dict[str, Any]]) -> str:
    """Return the JSON from which `report.js` draws timelines."""
    # One step of a 126-layer model has thousands of entries, so the JSON has each distinct entry
    # once, and a list of indices for each timeline. The script computes positions, intervals from
    # unshard to reshard, and gathered bytes. The templates also list the entries, for browsers that
    # do not run scripts.
    entries: dict[tuple[str | int | None, ...], int] = {}

    def place(entry: Entry) -> int:
        values = (entry.operation, entry.module, entry.phase, entry.axis, entry.nbytes)
        return entries.setdefault(values, len(entries))

    drawn = {}
    for section in sections:
        timelines = []
        for timeline in section["timelines"]:
            places = [place(entry) for entry in timeline.entries]
            order = [places[at] for at in timeline.order]
            timelines.append({"order": order, "peak": timeline.peak, "left_out": timeline.left_out})
        differing = sorted(section["differing"], key=str)
        drawn[section["id"]] = {"differing": differing, "timelines": timelines}
    text = json.dumps({"entries": [*entries], "sections": drawn}, separators=(",", ":"))
    # See Note [Safe pages].
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


# Note [Safe pages]
# Names of tests, modules and axes are arbitrary text. jinja escapes them (`autoescape`),
# `_printable` escapes control characters, and the JSON has no "<", which could end its element. In
# addition, the page's content security policy forbids loading anything, and allows only the style
# sheet and script whose digests it lists. It also forbids style attributes, so the script positions
# elements through their style properties, which the policy allows.


def _render(template: str, **values: Any) -> str:
    text = _environment().get_template(template).render(**values)
    # A test's id may contain a lone surrogate, which UTF-8 cannot encode.
    return text.encode("utf-8", "replace").decode("utf-8")


@functools.cache
def _environment() -> Environment:
    from jinja2 import (  # noqa: PLC0415  # needed only to render a page
        Environment,
        PackageLoader,
        StrictUndefined,
    )

    environment = Environment(
        loader=PackageLoader("pytest_fsdp_comm.reports.html"),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    words = (mark, parameter_words, placement_words, policy_words, relation_words, show_nbytes)
    filters = (*words, breakable, cost_rows, name_owners, name_ranks)
    environment.filters.update({function.__name__: function for function in filters})
    style, script = _asset("report.css"), _asset("report.js")
    environment.globals.update(
        marks=MARKS,
        max_rows=_MAX_ROWS,
        max_depth=_MAX_DEPTH,
        style=style,
        script=script,
        policy=(
            f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
    )
    return environment


def breakable(text: str) -> Any:
    """Escape an id, and allow line breaks after its separators."""
    from markupsafe import Markup, escape  # noqa: PLC0415  # installed with jinja2

    parts = re.split(r"(?<=[/_.:,\[{-])(?=[^:])", _printable(text))
    return Markup("<wbr>").join(map(escape, parts))


def _printable(value: Any) -> Any:
    # Trust Markup: only this module creates it, and only from printable text.
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return printable(value, "\n\t") if is_text else value


def _asset(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return a text's digest as the page's policy lists it (see Note [Safe pages])."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
