"""Run all benchmarks and write the results to docs/figures.md.

    python benchmarks/run.py [--turns 3] [--only ranks_overhead ...] [--release]

Each turn runs each benchmark once. The page shows the median and the quartiles of all values of a
figure, and the median of the last release. A figure counts as moved if its median changed by more
than both quartile ranges together, and by at least 5 %; this needs at least three values in both
runs. ``--only`` runs the named benchmarks and does not write the page. ``--release`` writes
benchmarks/figures.json, which later runs are compared with. The exit status is 1 if a figure moved
or exceeds its limit. Other programs on the machine distort the results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import torch
from figures import FILE

HERE: Final = Path(__file__).parent
RELEASE: Final = HERE / "figures.json"
PAGE: Final = HERE.parent / "docs" / "figures.md"
RECORDING: Final = ("recording_overhead", "--layers", "8", "32", "--turns")
SECTIONS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "A test on 4 ranks": (
        "Time of a trivial test, relative to four forked processes with a gloo group.",
        ("ranks_overhead",),
    ),
    "A recorded step": (
        "CPU time of a step, relative to a bare step. `block` includes entering and leaving it.",
        (*RECORDING, "10", "--kept", "200"),
    ),
    "A recorded script": (
        "CPU time of a step under `fsdp-comm record`, relative to a step of the bare script.",
        ("recorded_script", "--turns", "2"),
    ),
    "A simulated step": (
        "CPU time of a recorded Llama 3 step, relative to a bare one. `hsdp` is 8B with HSDP.",
        ("simulation", "--turns", "1"),
    ),
    "Folding and comparing": (
        "Time, relative to one `collections.Counter` pass over 100,000 events.",
        ("fold_compare",),
    ),
    "Explaining": (
        "CPU time to explain the diff of two 126-layer profiles, relative to comparing them.",
        ("explain",),
    ),
    "Merging ranks": (
        "CPU time to merge the profiles of all ranks, relative to merging half as many.",
        ("merge_ranks", "--ranks", "1024"),
    ),
}
"""By heading: the text below it, then the script and its arguments."""
MIN_MOVE: Final = 0.05
MIN_VALUES: Final = 3

Figures = dict[str, dict[str, dict[str, Any]]]
"""By heading and name: median, quartiles, number of values, limit."""


def main() -> int:
    """Measure, write the page, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", choices=[command[0] for _, command in SECTIONS.values()]
    )
    parser.add_argument("--release", action="store_true", help="compare later runs with this one")
    options = parser.parse_args()
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    limits: dict[str, float | None] = {}
    for turn in range(options.turns):
        for title, (_, command) in SECTIONS.items():
            if options.only and command[0] not in options.only:
                continue
            print(f"turn {turn + 1} of {options.turns}: {' '.join(command)}", file=sys.stderr)
            for line in _run(command):
                values[title][line["name"]] += line["values"]
                limits[line["name"]] = line["most"]
    measured: Figures = {
        title: {name: _figure(measurements, limits[name]) for name, measurements in named.items()}
        for title, named in values.items()
    }
    before: Figures = json.loads(RELEASE.read_text())["figures"] if RELEASE.exists() else {}
    lines, is_bad = _page(measured, before)
    text = "\n".join(lines) + "\n"
    print(text)
    if not options.only:
        PAGE.write_text(text, encoding="utf-8")
    if options.release:
        release = {"machine": _machine(), "figures": {**before, **measured}}
        RELEASE.write_text(json.dumps(release, indent=1) + "\n", encoding="utf-8")
    return int(is_bad)


def _run(command: tuple[str, ...]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures"
        file.touch()
        done = subprocess.run(
            [sys.executable, str(HERE / f"{command[0]}.py"), *command[1:]],
            env={**os.environ, FILE: str(file)},
            capture_output=True,
            text=True,
            check=False,
        )
        figures = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    # Some benchmarks exit with 1 if a figure exceeds its limit, which the page shows. But Python
    # also exits with 1 after an exception, and then figures are missing.
    has_raised = "Traceback (most recent call last)" in done.stderr
    if not figures or has_raised or done.returncode not in {0, 1}:
        raise SystemExit(f"{command} failed:\n{done.stdout}\n{done.stderr}")
    return figures


def _figure(values: list[float], most: float | None) -> dict[str, Any]:
    low, median, high = statistics.quantiles(values, n=4) if values[1:] else values * 3
    low, high = (
        max(low, min(values)),
        min(high, max(values)),
    )  # quartiles of two values lie outside them
    return {"median": median, "low": low, "high": high, "values": len(values), "most": most}


def _page(measured: Figures, before: Figures) -> tuple[list[str], bool]:
    """Return the lines of the page, and whether a figure moved or exceeds its limit."""
    lines = [
        "# Figures",
        "",
        "This page shows what the plugin costs, mostly relative to a baseline from the same run.",
        "",
        f"Measured by `benchmarks/run.py` on {_machine()}.",
    ]
    is_bad = False
    for title, named in measured.items():
        text, (script, *arguments) = SECTIONS[title]
        command = " ".join(("python", f"benchmarks/{script}.py", *arguments))
        counts = sorted({figure["values"] for figure in named.values()})
        number = " or ".join(map(str, counts))
        times = f"{number} times" if counts[-1] > 1 else "once"
        lines += ["", f"## {title}", "", text, f"Measured {times} with this command:"]
        lines += ["", f"`{command}`"]
        columns = ["", "median"]
        columns += ["quartiles"] if counts[-1] > 1 else []
        columns += ["limit"] if any(figure["most"] is not None for figure in named.values()) else []
        columns += ["last release"] if title in before else []
        last_case = None
        for name, figure in named.items():
            # Figures whose names start with the same text before a colon share a table.
            case, _, label = name.rpartition(": ")
            if case != last_case:
                lines += ["", f"### {case}"] if case else []
                lines += ["", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
                last_case = case
            old, limit = before.get(title, {}).get(name), figure["most"]
            has_moved = old is not None and _has_moved(figure, old)
            is_over = limit is not None and figure["median"] > limit
            is_bad |= has_moved or is_over
            cells = {
                "": label,
                "median": f"{figure['median']:.3g}" + (" **over**" if is_over else ""),
                "quartiles": f"{figure['low']:.3g}-{figure['high']:.3g}",
                "limit": f"{limit:g}" if limit is not None and limit < math.inf else "",
                "last release": (f"{old['median']:.3g}" if old else "")
                + (" **moved**" if has_moved else ""),
            }
            lines.append(f"| {' | '.join(cells[column] for column in columns)} |")
    return lines, is_bad


def _has_moved(figure: dict[str, Any], old: dict[str, Any]) -> bool:
    if min(figure["values"], old["values"]) < MIN_VALUES:
        return False  # too few values to estimate the noise
    noise = figure["high"] - figure["low"] + old["high"] - old["low"]
    return bool(abs(figure["median"] - old["median"]) > max(MIN_MOVE * old["median"], noise))


def _machine() -> str:
    cpus = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ] or [platform.machine()]
    python = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores of {cpus[0]}, {platform.system()}, {python}"


if __name__ == "__main__":
    sys.exit(main())
