"""Write the table of docs/torch-versions.md from docs/matrix: `python docs/matrix_table.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "torch-versions.md"
START, END = "<!-- table -->\n\n", "\n<!-- end of table -->"
PACKAGES = ("pytest", "syrupy", "pytest-xdist", "jinja2")


def records() -> list[dict[str, Any]]:
    """Read the results of `nox -s matrix`, the oldest torch first."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in DOCS.glob("matrix/*.json")]
    return sorted(results, key=lambda record: [_numbers(text) for text in _versions(record)])


def _versions(record: dict[str, Any]) -> tuple[str, ...]:
    names = ("torch", "python", *PACKAGES)
    return tuple(record["versions"][name] for name in names)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def table() -> str:
    """Return the numbers of passed, failed and skipped tests as Markdown."""
    results = records()
    rows = [
        ("torch", "Python", ", ".join(PACKAGES), "upstream", "examples", "commit"),
        ("---",) * 6,
    ]
    # One bullet for each failed test and each reason, with all versions that it applies to.
    bullets: dict[tuple[str, str], list[str]] = {}
    for record in results:
        torch, python, *packages = _versions(record)
        upstream, examples = (_counts(record["runs"][name]) for name in ("upstream", "examples"))
        commit = f"`{record['commit']}`"
        rows.append((torch, python, ", ".join(packages), upstream, examples, commit))
        for test in record["failed"]:
            bullets.setdefault(("Failed", f"`{test}`"), []).append(torch)
        for reason in record["skipped"]:
            bullets.setdefault(("Skipped", reason), []).append(torch)
    plugins = sorted({record["versions"]["pytest-fsdp-comm"] for record in results})
    dates = sorted({record["date"] for record in results})
    lines = [f"Results of pytest-fsdp-comm {', '.join(plugins)} on {', '.join(dates)}:", ""]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += [""]
    for (outcome, text), versions in bullets.items():
        lines.append(f"- {outcome} with torch {', '.join(dict.fromkeys(versions))}: {text}")
    return "\n".join(lines).rstrip() + "\n"


def _counts(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())


def main() -> None:
    """Replace the table on the page."""
    before, _, after = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(before + START + table() + END + after.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
