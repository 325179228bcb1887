"""Summaries and annotations: what they say, that no name is markup, and that they are bounded."""

import dataclasses
import html
import re

from markdown_it import MarkdownIt

from pytest_fsdp_comm.reports.ci.outcomes import (
    Comparisons,
    FailedTest,
    Origin,
    Outcomes,
    Place,
)
from pytest_fsdp_comm.reports.ci.review import annotate, fenced, plain, render_summary

HOSTILE = "tests/a b.py::test_x[`|<b>_*~#@me [x](y) \\ &amp; ![](z) :tada: \x1b[31m\n|]"
ORIGIN = Origin(commit="abc123", address="https://github.com/o/r")


def failed(
    nodeid="tests/test_a.py::test_x", story=("comm_mode differs", "  a: +1"), path="tests/test_a.py"
):
    comparisons = Comparisons(
        files=("snapshots/a.comm",),
        headline="a: +1 all_gather",
        story=tuple(story),
        cost=("+63 % bytes in all_gather[dp] (1.4 -> 2.3 MiB)", "peak gathered unchanged"),
        accept='pytest --snapshot-update "tests/test_a.py::test_x"',
    )
    return FailedTest(
        nodeid=nodeid,
        reason=comparisons.headline,
        place=Place(path=path, line=12),
        comparisons=comparisons,
    )


def outcomes(*tests, **fields):
    return Outcomes(compared_tests=9, compared_files=14, failed=tests, **fields)


def rendered(text):
    """As GitHub renders it, apart from what it cleans."""
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


def shown(text):
    return " ".join(
        html.unescape(re.sub(r"<[^>]+>", " ", rendered(text).replace("<wbr>", ""))).split()
    )


def test_a_session_that_passed_is_one_line():
    assert render_summary(outcomes(), ORIGIN).strip() == (
        "Communication: 14 snapshots in 9 tests compared, all equal."
    )
    nothing = Outcomes(compared_tests=0, compared_files=0)
    assert render_summary(nothing, ORIGIN).startswith("No test compared anything")


def test_a_failed_test_gets_a_row_with_change_and_cost_and_its_story():
    text = render_summary(outcomes(failed()), ORIGIN)
    assert shown(text) == (
        "Communication: differs from the reviewed snapshots in 1 test "
        "14 snapshots in 9 tests compared. "
        "test what differs cost "
        "tests/test_a.py::test_x a: +1 all_gather "
        "+63 % bytes in all_gather[dp] (1.4 -> 2.3 MiB) peak gathered unchanged "
        "tests/test_a.py::test_x comm_mode differs a: +1 "
        'To accept it: pytest --snapshot-update "tests/test_a.py::test_x"'
    )
    address = '<a href="https://github.com/o/r/blob/abc123/tests/test_a.py#L12">'
    assert address in rendered(text)
    assert "<a " not in rendered(render_summary(outcomes(failed()), Origin()))
    # Spaces and the like are no part of an address.
    odd = render_summary(outcomes(failed(path='a "b"|.py')), ORIGIN)
    assert "/blob/abc123/a%20%22b%22%7C.py#L12" in odd


def test_other_failures_unused_files_and_an_early_end_are_reported():
    other = FailedTest(nodeid="t.py::test_y", reason="rank 1 died", place=None)
    text = render_summary(
        outcomes(
            failed(),
            other,
            unused=("snapshots/a_b.comm",),
            ended_early="The session ended early (-x).",
        ),
        ORIGIN,
    )
    said = shown(text)
    assert "snapshots in 1 test, 1 test failed for another reason" in said
    assert "The session ended early (-x)." in said
    assert "t.py::test_y rank 1 died" in said
    assert "1 snapshot file unused" in said
    assert "snapshots/a_b.comm" in said


def test_names_are_never_rendered_as_markup():
    fence = "a\n````\n<b>b</b>"
    text = render_summary(outcomes(failed(HOSTILE, story=[fence, HOSTILE, "</details>"])), ORIGIN)
    page = rendered(text)
    assert page.count("<tr>") == 2
    assert len(re.findall("<td", page)) == 3
    for tag in ("<b>", "<em>", "<img", "<strong>", "<del>"):
        assert tag not in page, tag
    assert page.count("<a ") == 1
    assert page.count("</details>") == 1
    assert "\x1b" not in page
    name = " ".join(HOSTILE.replace("\x1b", "\\x1b").split())
    assert shown(plain(HOSTILE)) == name
    assert name in shown(text)
    assert rendered(fenced(fence)).count("<pre>") == 1


def test_a_summary_is_bounded_and_counts_what_it_drops():
    tests = [
        failed(f"tests/test_a.py::test_{number}", story=["é" * 30_000]) for number in range(250)
    ]
    text = render_summary(outcomes(*tests), ORIGIN)
    assert 600_000 < len(text.encode()) < 1_000_000
    assert text.count("\n| <a href") == 200
    assert "| 50 more | | |" in text
    assert text.count("<details>") == 40
    assert "210 more stories are in the log" in text
    assert text.count("```text") % 2 == 0


def sent(*causes, name="test_x"):
    """A failed test with causes, each sent by a line of train.py."""
    places = ((Place(path="src/a,b/train.py", line=line), text) for line, text in causes)
    return dataclasses.replace(failed(f"tests/test_a.py::{name}"), sent=tuple(places))


def test_annotate_cause_of_tests_is_at_its_line():
    both = (7, "a: +1, 100 %"), (9, "b: gone")
    found = annotate(outcomes(sent(*both), sent(both[0], name="test_y[1]")))
    accept = 'accept: pytest --snapshot-update "tests/test_a.py::test_x"'
    assert found == [
        "::error file=src/a%2Cb/train.py,line=7,title=a%3A +1%2C 100 %25::a: +1, 100 %25%0A"
        f"fails tests/test_a.py::test_x and 1 more test%0A{accept}",
        "::error file=src/a%2Cb/train.py,line=9,title=b%3A gone::b: gone%0A"
        f"fails tests/test_a.py::test_x%0A{accept}",
    ]
    # Without a known line, the log and the summary have it.
    assert annotate(outcomes(failed())) == []


def test_annotate_eleven_causes_counts_the_rest():
    ten = annotate(outcomes(*[sent((line, "a")) for line in range(1, 11)]))
    assert len(ten) == 10
    assert not any("more in the log" in one for one in ten)
    many = annotate(outcomes(*[sent((line, "a")) for line in range(1, 26)]))
    assert len(many) == 10
    assert many[-1] == (
        "::error title=communication::16 more in the log and in the summary of the step"
    )


def test_annotate_hostile_text_stays_in_one_line():
    (line,) = annotate(outcomes(sent((1, "::error::x\n\x1b[31m" + "y" * 9_000))))
    assert line.isprintable()
    assert len(line) < 4_400
    assert line.endswith(" more characters")
