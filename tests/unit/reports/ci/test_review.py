"""Summaries and annotations: their texts, escaped names, and limits of size."""

import dataclasses
import html
import re

import pytest
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
    nodeid="tests/test_a.py::test_x",
    explanation=("comm_mode differs", "  a: +1"),
    path="tests/test_a.py",
    command="pytest --snapshot-update ",
):
    comparisons = Comparisons(
        files=("snapshots/a.comm",),
        headline="a: +1 all_gather",
        explanation=tuple(explanation),
        cost=("+63 % bytes in all_gather[dp] (1.4 -> 2.3 MiB)", "peak gathered unchanged"),
        accept=f'{command}"{nodeid}"',
        test=f'"{nodeid}"',
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
    """Render Markdown like GitHub, without its sanitizing."""
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
    assert render_summary(nothing, ORIGIN).startswith("No test compared a")


def test_summary_failed_test_has_row_and_explanation():
    text = render_summary(outcomes(failed()), ORIGIN)
    assert shown(text) == (
        "Communication differs from the reviewed snapshots in 1 test "
        "14 snapshots in 9 tests compared. "
        "test what differs cost "
        "tests/test_a.py::test_x a: +1 all_gather "
        "+63 % bytes in all_gather[dp] (1.4 -> 2.3 MiB) peak gathered unchanged "
        "tests/test_a.py::test_x comm_mode differs a: +1 "
        'To accept it: pytest --snapshot-update "tests/test_a.py::test_x" '
        "If the tests ran with --comm-artifacts=DIRECTORY , fsdp-comm accept DIRECTORY accepts all "
        "changes without another run."
    )
    address = '<a href="https://github.com/o/r/blob/abc123/tests/test_a.py#L12">'
    assert address in rendered(text)
    assert "<a " not in rendered(render_summary(outcomes(failed()), Origin()))
    # Spaces in URLs are escaped.
    odd = render_summary(outcomes(failed(path='a "b"|.py')), ORIGIN)
    assert "/blob/abc123/a%20%22b%22%7C.py#L12" in odd


def test_summary_other_failures_unused_and_early_end():
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
    text = render_summary(
        outcomes(failed(HOSTILE, explanation=[fence, HOSTILE, "</details>"])), ORIGIN
    )
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
        failed(f"tests/test_a.py::test_{number}", explanation=["", f"{number}" + "é" * 30_000])
        for number in range(250)
    ]
    text = render_summary(outcomes(*tests), ORIGIN)
    assert 600_000 < len(text.encode()) < 1_000_000
    assert text.count("\n| <a href") == 200
    assert "| 50 more | | |" in text
    assert text.count("<details>") == 40
    assert "The explanations of 210 more changes are in the log" in text
    assert text.count("```text") % 2 == 0


SIX = [f"tests/test_{name}.py::test_x[{number}]" for name in "ab" for number in range(3)]


def test_a_change_of_six_tests_is_told_once():
    # Each has its own file, and its own line of the loop that the same module runs in.
    tests = [
        failed(
            nodeid, [f"comm_mode differs from {n}", f"  a: +1, at tests/test_{nodeid[11]}.py:{n}"]
        )
        for n, nodeid in enumerate(SIX)
    ]
    text = shown(render_summary(outcomes(*tests), ORIGIN))
    assert "in 6 tests by 1 change" in text
    assert text.count("a: +1, at") == 1
    assert text.count("To accept it: ") == 1
    six = " ".join(f'"{nodeid}"' for nodeid in SIX)
    assert f"pytest --snapshot-update {six}" in text
    # In the table, in the list and in the command.
    assert [text.count(nodeid) for nodeid in SIX] == [3, 3, 3, 2, 2, 2]
    assert "and 3 more" in text
    # A line for one more would be as long as its name.
    four = shown(render_summary(outcomes(*tests[:4]), ORIGIN))
    assert " more" not in four
    assert four.count(SIX[3]) == 3  # in the command too


@pytest.mark.parametrize(
    "line",
    # Another module, size, call site, cause, or nothing more.
    ["  b: +1, at m.py:1", "  a: +2, at m.py:1", "  a: +1, at m.py:2", "  likely: x", "  a: +1"],
)
def test_changes_that_look_alike_are_told_apart(line):
    one = failed(SIX[0], ["", "  +1 %", "  a: +1, at m.py:1"])
    for nodeid in (SIX[1], SIX[4]):
        assert len(outcomes(one, failed(nodeid, ["", "  +1 %", line])).changes) == 2
        # What is not compared, or to be done, belongs to one test.
        same = failed(nodeid, [*one.comparisons.explanation, "  note: x", "  fix: y"])
        assert len(outcomes(one, same).changes) == 1


COSTS = ("+63 % bytes in all_gather[dp] (1.4 -> 2.3 MiB)",), ("x4.0 bytes in all", "peak")
MOVED = "  head split off from unit (root): {}"


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        (MOVED.format("2 calls, 20.0 KiB in total"), MOVED.format("1 call of 96 B"), True),
        ("  head 10.1 -> 40.2 KiB per gather", "  head 64 B -> 1.0 MiB per gather", True),
        ("  head 10.1 -> 40.2 KiB per gather", "  head 1.0 MiB -> 64 B per gather", False),
        (
            "  head in forward: all_gather[dp] 1 -> 2",
            "  head in forward: all_gather[dp] 1 -> 3",
            False,
        ),
        (
            MOVED.format("2 calls"),
            "  head split off from unit layers.0: 2 calls",
            False,
        ),
        # Without a change, the cost is all there is.
        (None, None, False),
    ],
)
def test_group_of_tests_ignores_their_amounts(before, after, is_same):
    tests = []
    for nodeid, line, cost in zip(SIX, (before, after), COSTS, strict=False):
        story = ["comm_mode differs", *(f"  {one}" for one in cost), *([line] if line else [])]
        one = failed(nodeid, story)
        comparisons = dataclasses.replace(one.comparisons, cost=cost)
        tests.append(dataclasses.replace(one, comparisons=comparisons))
    assert len(outcomes(*tests).changes) == 2 - is_same
    said = shown(render_summary(outcomes(*tests), ORIGIN))
    # Once in the table, once above the explanation.
    assert said.count("Numbers of the first test; those of the other tests differ") == 2 * is_same


def test_groups_differ_if_accept_commands_differ():
    update = "pytest --snapshot-update "
    commands = f"rm a.comm && {update}", f"rm b.comm && {update}", update
    tests = [failed(name, command=command) for name, command in zip("abc", commands, strict=True)]
    assert len(outcomes(*tests).changes) == 3


def sent(*causes, name="test_x"):
    """Return a failed test with causes, each sent by a line of train.py."""
    places = ((Place(path="src/a,b/train.py", line=line), text) for line, text in causes)
    return dataclasses.replace(failed(f"tests/test_a.py::{name}"), sent=tuple(places))


def test_annotate_cause_of_tests_is_at_its_line():
    both = (7, "a: +1, 100 %"), (9, "b: gone")
    found = annotate(outcomes(sent(*both), sent(both[0], name="test_y[1]")))
    accept = 'accept: pytest --snapshot-update "tests/test_a.py::test_x"'
    assert found == [
        "::error file=src/a%2Cb/train.py,line=7,title=a%3A +1%2C 100 %25::a: +1, 100 %25%0A"
        f'fails tests/test_a.py::test_x and 1 more test%0A{accept} "tests/test_a.py::test_y[1]"',
        "::error file=src/a%2Cb/train.py,line=9,title=b%3A gone::b: gone%0A"
        f"fails tests/test_a.py::test_x%0A{accept}",
    ]


def test_annotate_other_options_need_two_commands():
    other = failed("tests/test_a.py::test_y", command="pytest --snapshot-update --world-size=4 ")
    place = Place(path="train.py", line=7)
    tests = [
        dataclasses.replace(one, sent=((place, text),))
        for one, text in ((failed(), "a: 1.0 -> 2.0 KiB"), (other, "a: 64 -> 96 B"))
    ]
    (line,) = annotate(outcomes(*tests))
    assert line.partition("::a: ")[2] == (
        "1.0 -> 2.0 KiB%0Afails tests/test_a.py::test_x and 1 more test%0A"
        'accept: pytest --snapshot-update "tests/test_a.py::test_x"%0A'
        'accept: pytest --snapshot-update --world-size=4 "tests/test_a.py::test_y"'
    )


def test_annotate_without_call_site_is_at_assertion():
    unsent = failed(), failed("tests/test_a.py::test_y")
    (line,) = annotate(outcomes(*unsent))
    assert line.startswith("::error file=tests/test_a.py,line=12,title=a%3A +1 all_gather::")
    assert "fails tests/test_a.py::test_x and 1 more test%0A" in line
    # Another plugin annotates them.
    assert annotate(outcomes(*unsent, annotates_all=False)) == []
    # Tests that failed for another reason are not about communication.
    other = FailedTest(nodeid="t.py::test_y", reason="died", place=Place(path="t.py", line=1))
    assert annotate(outcomes(other)) == []


def test_annotate_many_tests_has_no_part_of_a_command():
    tests = [
        dataclasses.replace(failed(f"tests/test_a.py::test_{n}"), sent=sent((7, "a")).sent)
        for n in range(200)
    ]
    (line,) = annotate(outcomes(*tests))
    assert line.endswith("fails tests/test_a.py::test_0 and 199 more tests")


def test_annotate_eleven_causes_counts_the_rest():
    ten = annotate(outcomes(*[sent((line, "a")) for line in range(1, 11)]))
    assert len(ten) == 10
    assert not any("more problems are in" in line for line in ten)
    many = annotate(outcomes(*[sent((line, "a")) for line in range(1, 26)]))
    assert len(many) == 10
    assert many[-1] == (
        "::error title=communication::16 more problems are in the log and step summary"
    )


def test_annotate_hostile_text_stays_in_one_line():
    (line,) = annotate(outcomes(sent((1, "::error::x\n\x1b[31m" + "y" * 9_000))))
    assert line.isprintable()
    assert len(line) < 4_400
    assert line.endswith(" more characters")
