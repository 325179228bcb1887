"""Write the tables of docs/history.md from tests/history: `python docs/history_table.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from history.cases import HISTORY  # noqa: E402  # tests are not a package

if TYPE_CHECKING:
    from collections.abc import Iterator

    from history.reported import Reported

PAGE = ROOT / "docs" / "history.md"
START, END = "<!-- table -->\n\n", "\n<!-- end of table -->"


def table() -> str:
    """Return one table for each file of cases, as Markdown."""
    # The module of a case, which is its family, is the module of the function that builds it.
    families: dict[str, list[Reported]] = {}
    for case in HISTORY.values():
        families.setdefault(case.build.__module__, []).append(case)
    return "\n".join(line for name, cases in families.items() for line in _family(name, cases))


def _family(name: str, cases: list[Reported]) -> Iterator[str]:
    title, _, text = (sys.modules[name].__doc__ or "").strip().partition(": ")
    yield from (f"## {title}", "", f"{text[0].upper()}{text[1:]}", "")
    yield "| project | what happened | first line of the failure |"
    yield "| --- | --- | --- |"
    for case in cases:
        threads = "<br>".join(_link(thread) for thread in case.threads)
        happened = f"{case.happened} *{case.cost}*" if case.cost else case.happened
        yield f"| {threads} | {happened} | {'<br>'.join(_lines(case))} |"
    yield ""


def _link(thread: str) -> str:
    owner, project, _, number = thread.split("/")
    return f"[{owner}/{project} {number}](https://github.com/{thread})"


def _lines(case: Reported) -> Iterator[str]:
    if case.first:
        yield f"`{case.first}`"
    if case.likely:
        yield f"`likely: {case.likely}`"
    if case.tree:
        yield f"tree: `{case.tree}`"


def main() -> None:
    """Replace the tables on the page."""
    before, _, after = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(before + START + table() + END + after.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
