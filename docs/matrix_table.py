"""Writes the tables of docs/limits.md from docs/matrix: `python docs/matrix_table.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "limits.md"
START, END = "<!-- table -->\n\n", "\n<!-- end of table -->"
PACKAGES = ("pytest", "syrupy", "pytest-xdist", "jinja2")


def records() -> list[dict[str, Any]]:
    """What each run of `nox -s matrix` saw, the oldest torch first."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in DOCS.glob("matrix/*.json")]
    return sorted(found, key=lambda record: [_numbers(text) for text in _versions(record)])


def _versions(record: dict[str, Any]) -> tuple[str, ...]:
    names = ("torch", "python", *PACKAGES)
    return tuple(record["versions"][name] for name in names)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def table() -> str:
    """What passed, failed and was skipped, as Markdown."""
    rows = [
        ("torch", "Python", ", ".join(PACKAGES), "`-m upstream`", "examples", "when", "commit"),
        ("---",) * 7,
    ]
    told: dict[str, list[str]] = {}
    for record in records():
        torch, python, *others = _versions(record)
        upstream, examples = (_counts(record["runs"][name]) for name in ("upstream", "examples"))
        when, commit = record["date"], f"`{record['commit']}`"
        rows.append((torch, python, ", ".join(others), upstream, examples, when, commit))
        for test in record["failed"]:
            told.setdefault(f"failed: `{test}`", []).append(torch)
        for reason in record["skipped"]:
            told.setdefault(f"skipped: {reason}", []).append(torch)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", *(f"- torch {', '.join(dict.fromkeys(on))}, {what}" for what, on in told.items())]
    return "\n".join(lines).rstrip() + "\n"


def _counts(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())


def main() -> None:
    """Replaces the tables on the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(before + START + table() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
