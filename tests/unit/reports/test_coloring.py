"""The colours of a failed comparison, on pytest's own writer."""

import io
import re

import pytest
from _pytest._io import TerminalWriter

from pytest_fsdp_comm.reports.coloring import Painter, markup_of

MARKUP = {
    "- forward a all_gather[dp] x1 of 8 B": {"red"},
    "+ forward a all_gather[dp] x1 of 8 B": {"green"},
    "  forward a all_gather[dp] x1 of 8 B": set(),
    "  forward a redistribute (Shard(dim=0))->(Replicate()) x1": set(),
    "  peak gathered 512 B": set(),
    "  lm_head forward: all_gather[dp] 0 -> 8 (+8), 0 B -> 64.0 KiB per rank": {"green"},
    "  comm: lm_head forward: all_gather[dp] 8 -> 0 (-8)": {"red"},
    "  a forward: all_reduce[dp] 1 (of 8 B float32) on rank 0 -> 0": {"red"},
    "  a forward: all_reduce[dp] 1 (of 8 B) on rank 0 -> 2 (of 8 B) on rank 1": set(),
    "  a forward: all_gather[dp] 1 -> 2 (+1)": set(),
    "  a forward: all_gather[dp] 10 -> 20 (+10)": set(),
    "  tree: lm_head: becomes a unit of its own (fsdp2)": {"green"},
    "  lm_head: is no longer a unit (fsdp2)": {"red"},
    "  peak gathered: 512 B -> 1_024 B": {"yellow", "bold"},
    "  +63 % bytes in all_gather[dp]": {"yellow", "bold"},
    "  likely: a unit is missing": {"yellow"},
    "  note: the model is on meta": {"yellow"},
    "  ... and 3 more changes (-vv)": set(),
    "  accept: pytest --snapshot-update": set(),
    "comm: snapshots/test_it/test_step.ws2.comm": {"bold"},
    "": set(),
}


@pytest.mark.parametrize("line", MARKUP)
def test_a_line_is_coloured_by_what_it_is(line):
    assert {name for name, is_on in markup_of(line).items() if is_on} == MARKUP[line]


def write(paint, *, has_markup):
    file = io.StringIO()
    writer = TerminalWriter(file)
    writer.hasmarkup, writer.fullwidth = has_markup, 40
    out = Painter(writer) if paint else writer
    out.line("comm_mode = <CommMode>")
    out.line("E       1 -> 0", bold=True, red=True)
    out.line("E       assert comm_mode differs from x", bold=True, red=True)
    out.line("E           likely: y", bold=True, red=True)
    out.line("E           accept: pytest", bold=True, red=True)
    out.write("x.py", bold=True, red=True)
    out.line(":3: AssertionError")
    out.sep("-", "comparison")
    out.line("- old\n+ new\n  same")
    out.sep("-", "ranks")
    out.line("- rank 1 did not fail")
    return file.getvalue()


def test_painting_changes_no_character_and_needs_a_writer_with_markup():
    plain = write(paint=False, has_markup=False)
    assert write(paint=True, has_markup=False) == plain
    painted = write(paint=True, has_markup=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain


def test_what_is_below_and_what_follows_the_assertion_is_painted_and_no_other_line():
    painted = write(paint=True, has_markup=True).splitlines()
    ordinary = write(paint=False, has_markup=True).splitlines()
    unlike = [new for new, old in zip(painted, ordinary, strict=True) if new != old]
    red = "\x1b[1m\x1b[31m"
    assert {line.replace("\x1b[31m\x1b[1m", red) for line in unlike} == {
        f"{red}E         \x1b[0m\x1b[33m  likely: y\x1b[0m",
        f"{red}E         \x1b[0m  accept: pytest",
        "\x1b[31m- old\x1b[0m",
        "\x1b[32m+ new\x1b[0m",
    }
