"""Runs all benchmarks, each as ratios to what runs beside it, and draws docs/figures.md.

    python benchmarks/run.py [--turns 3] [--only ranks_overhead ...] [--release]

Every turn runs each benchmark once. Of all values of a figure the page has the median and the
quartiles. Beside them stands the median of the last release, and a figure is flagged if it moved by
more than the noise band: both spans between quartiles, and at least 5 %, where there are three
values or more. Without ``--only``, the page is written; ``--release`` writes
benchmarks/figures.json, what the next run is compared with. Exit status 1 if a figure is flagged or
is more than it may be. Let nothing else run meanwhile.
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
COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "Ranks, beside forked processes": ("ranks_overhead",),
    "Recording, beside nothing": (*RECORDING, "10", "--kept", "200"),
    "A recorded script, beside the script alone": ("recorded_script", "--turns", "2"),
    "Simulation, beside the bare simulated step": ("simulation", "--turns", "1"),
    "Folding and comparing, beside one pass over the events": ("fold_compare",),
    "Explaining, beside comparing": ("explain",),
    "Merging ranks, beside half as many": ("merge_ranks", "--ranks", "1024"),
}
LEAST_BAND: Final = 0.05
LEAST_VALUES: Final = 3

Figures = dict[str, dict[str, dict[str, Any]]]
"""By benchmark and name: the median, the quartiles, how many values, and the limit."""


def main() -> int:
    """Measures, writes the page, and says what moved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[command[0] for command in COMMANDS.values()])
    parser.add_argument("--release", action="store_true", help="keep it for later comparisons")
    options = parser.parse_args()
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    limits: dict[str, float | None] = {}
    for turn in range(options.turns):
        for title, command in COMMANDS.items():
            if options.only and command[0] not in options.only:
                continue
            print(f"turn {turn + 1} of {options.turns}: {' '.join(command)}", file=sys.stderr)
            for line in _run(command):
                values[title][line["name"]] += line["values"]
                limits[line["name"]] = line["most"]
    measured: Figures = {
        title: {name: _figure(own, limits[name]) for name, own in named.items()}
        for title, named in values.items()
    }
    before: Figures = json.loads(RELEASE.read_text())["figures"] if RELEASE.exists() else {}
    lines, is_bad = _page(measured, before)
    text = "\n".join(lines) + "\n"
    print(text)
    if not options.only:
        PAGE.write_text(text, encoding="utf-8")
    if options.release:
        found = {"machine": _machine(), "figures": {**before, **measured}}
        RELEASE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(is_bad)


def _run(command: tuple[str, ...]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "figures"
        kept.touch()
        done = subprocess.run(
            [sys.executable, str(HERE / f"{command[0]}.py"), *command[1:]],
            env={**os.environ, FILE: str(kept)},
            capture_output=True,
            text=True,
            check=False,
        )
        found = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    # Some end with 1 where a limit is missed, which the page says.
    if not found or done.returncode not in {0, 1}:
        raise SystemExit(f"{command} measured nothing:\n{done.stdout}\n{done.stderr}")
    return found


def _figure(values: list[float], most: float | None) -> dict[str, Any]:
    low, median, high = statistics.quantiles(values, n=4) if values[1:] else values * 3
    low, high = max(low, min(values)), min(high, max(values))  # of two, they lie outside
    return {"median": median, "low": low, "high": high, "values": len(values), "most": most}


def _page(measured: Figures, before: Figures) -> tuple[list[str], bool]:
    lines = [
        "# Figures",
        "",
        "What the plugin costs, as ratios to what ran beside it, drawn by `benchmarks/run.py`.",
        "",
        f"Measured on {_machine()}.",
    ]
    is_bad = False
    for title, named in measured.items():
        script, *arguments = COMMANDS[title]
        command = " ".join(("python", f"benchmarks/{script}.py", *arguments))
        lines += ["", f"## {title}", "", f"`{command}`", ""]
        lines += ["| | median | quartiles | values | may be | last release |", "|---|" + "---|" * 5]
        for name, own in named.items():
            old, most = before.get(title, {}).get(name), own["most"]
            has_moved = old is not None and _has_moved(own, old)
            is_over = most is not None and own["median"] > most
            is_bad |= has_moved or is_over
            cells = (
                name,
                f"{own['median']:.3g}" + (" **over**" if is_over else ""),
                f"{own['low']:.3g} to {own['high']:.3g}" if own["values"] > 1 else "",
                str(own["values"]),
                f"{most:g}" if most is not None and most < math.inf else "",
                (f"{old['median']:.3g}" if old else "") + (" **moved**" if has_moved else ""),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines, is_bad


def _has_moved(own: dict[str, Any], old: dict[str, Any]) -> bool:
    if min(own["values"], old["values"]) < LEAST_VALUES:
        return False  # they show no noise
    band = own["high"] - own["low"] + old["high"] - old["low"]
    return bool(abs(own["median"] - old["median"]) > max(LEAST_BAND * old["median"], band))


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
