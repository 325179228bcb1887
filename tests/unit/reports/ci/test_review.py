"""Summaries and annotations: their texts, escaped names, and limits of size."""

import dataclasses
import html
import re

import pytest
from markdown_it import MarkdownIt
from report_values import failure_of

from pytest_fsdp_comm.reports.ci.outcomes import (
    FailedTest,
    FileLine,
    Origin,
    Outcomes,
)
from pytest_fsdp_comm.reports.ci.review import annotate, escape_text, fence, render_summary
from pytest_fsdp_comm.reports.explanation import write_headline

HOSTILE = "tests/a b.py::test_x[`|<b>_*~#@me [x](y) \\ &amp; ![](z) :tada: \x1b[31m\n|]"
ORIGIN = Origin(commit="abc123", address="https://github.com/o/r")


COST = ("+63 % bytes in all_gather[dp] (1.4 -> 2.3 MiB)", "peak gathered unchanged")


def failed(
    nodeid="tests/test_a.py::test_x",
    changes=("a: +1 all_gather",),
    path="tests/test_a.py",
    command="pytest --snapshot-update ",
    cost=COST,
    **texts,
):
    failure = failure_of(
        "comm_mode differs", change=changes, cost=cost, command=command, test=f'"{nodeid}"', **texts
    )
    return FailedTest(
        nodeid=nodeid,
        reason=write_headline(failure),
        location=FileLine(path=path, line=12),
        failure=failure,
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
        "tests/test_a.py::test_x comm_mode differs a: +1 all_gather "
        "cost: +63 % bytes in all_gather[dp] (1.4 -> 2.3 MiB) cost: peak gathered unchanged "
        'To accept it: pytest --snapshot-update "tests/test_a.py::test_x"'
    )
    address = '<a href="https://github.com/o/r/blob/abc123/tests/test_a.py#L12">'
    assert address in rendered(text)
    assert "<a " not in rendered(render_summary(outcomes(failed()), Origin()))
    # Spaces in URLs are escaped.
    odd = render_summary(outcomes(failed(path='a "b"|.py')), ORIGIN)
    assert "/blob/abc123/a%20%22b%22%7C.py#L12" in odd


def test_summary_says_what_to_do_with_saved_directories():
    saved = {"artifacts": "ci files", "report": "out/index.html"}
    text = shown(render_summary(outcomes(failed(), **saved), Origin()))
    assert text.endswith(
        "The report out/index.html is in the artifacts of this run, if the job saves it. To accept "
        "these changes without another run, download the differences from the artifacts of this "
        "run to a directory differences , then run fsdp-comm accept differences ."
    )
    # A path of the runner means nothing to the author.
    on_runner = {"artifacts": "/runner/_temp/differences.x", "report": "/runner/_temp/r/index.html"}
    text = shown(render_summary(outcomes(failed(), **on_runner), Origin()))
    assert "The report index.html is in" in text
    assert "/runner" not in text
    origin = dataclasses.replace(
        ORIGIN, run_address="https://github.com/o/r/actions/runs/7#artifacts"
    )
    page = rendered(render_summary(outcomes(failed(), **saved), origin))
    assert page.count(f'<a href="{origin.run_address}">the artifacts of this run</a>') == 2
    other = FailedTest(nodeid="t.py::test_y", reason="rank 1 died", location=None)
    refused = failed("t.py::test_z", command="")
    for test in (other, refused):
        text = render_summary(outcomes(test, **saved), ORIGIN)
        assert "fsdp-comm accept" not in text
        assert "The report <code>out/index.html</code> is in" in text
    assert "fsdp-comm accept" in render_summary(outcomes(other, failed(), refused, **saved), ORIGIN)
    assert "artifacts" not in render_summary(outcomes(failed()), origin)


def test_summary_other_failures_unused_and_early_end():
    other = FailedTest(nodeid="t.py::test_y", reason="rank 1 died", location=None)
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
    assert "snapshots in 1 test, 1 more test failed" in said
    assert "The session ended early (-x)." in said
    assert "t.py::test_y rank 1 died" in said
    assert "1 snapshot file unused" in said
    assert "snapshots/a_b.comm" in said
    assert text.endswith("removes them:\n\n- <code>snapshots/a_b.comm</code>\n\n")
    many = render_summary(outcomes(unused=("a.comm",) * 53), ORIGIN)
    assert many.count("a.comm") == 50
    assert many.endswith("<code>a.comm</code>\n- 3 more\n\n")


def test_summary_says_where_to_run_the_commands():
    where = "Run the commands in services/one ."
    assert where in shown(render_summary(outcomes(failed(), directory="services/one"), ORIGIN))
    for silent in (outcomes(failed()), outcomes(failed(command=""), directory="services/one")):
        assert "Run the commands" not in render_summary(silent, ORIGIN)


def test_names_are_never_rendered_as_markup():
    ticks = "a\n````\n<b>b</b>"
    test = failed(HOSTILE, [ticks, HOSTILE, "</details>"])
    text = render_summary(outcomes(test, artifacts=HOSTILE, report=HOSTILE), ORIGIN)
    page = rendered(text)
    assert page.count("<tr>") == 2
    assert len(re.findall("<td", page)) == 3
    for tag in ("<b>", "<em>", "<img", "<strong>", "<del>"):
        assert tag not in page, tag
    assert page.count("<a ") == 1
    assert page.count("</details>") == 1
    assert "\x1b" not in page
    name = " ".join(HOSTILE.replace("\x1b", "\\x1b").split())
    assert shown(escape_text(HOSTILE)) == name
    assert name in shown(text)
    assert rendered(fence(ticks)).count("<pre>") == 1


def test_a_summary_is_bounded_and_counts_what_it_drops():
    tests = [
        failed(f"tests/test_a.py::test_{number}", [f"{number}" + "é" * 30_000])
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
        failed(nodeid, [f"a: +1, at tests/test_{nodeid[11]}.py:{n}"])
        for n, nodeid in enumerate(SIX)
    ]
    text = shown(render_summary(outcomes(*tests), ORIGIN))
    assert "in 6 tests" in text
    # In the table, above the list and in the explanation.
    assert text.count("a: +1, at") == 3
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
    ["b: +1, at m.py:1", "a: +2, at m.py:1", "a: +1, at m.py:2", "x", "a: +1"],
)
def test_changes_that_look_alike_are_told_apart(line):
    one = failed(SIX[0], ["a: +1, at m.py:1"])
    for nodeid in (SIX[1], SIX[4]):
        assert len(outcomes(one, failed(nodeid, [line])).changes) == 2
        # Another cause, or a change that breaks training.
        for severity in ("likely", "breaks_training"):
            other = failed(nodeid, ["a: +1, at m.py:1"], **{severity: ("x",)})
            assert len(outcomes(one, other).changes) == 2
        # What is not compared, or to be done, belongs to one test.
        same = failed(nodeid, ["a: +1, at m.py:1"], note=("x",), fix=("y",))
        assert len(outcomes(one, same).changes) == 1


COSTS = ("+63 % bytes in all_gather[dp] (1.4 -> 2.3 MiB)",), ("x4.0 bytes in all", "peak")
MOVED = "head split off from unit (root): {}"


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        (MOVED.format("2 calls, 20.0 KiB in total"), MOVED.format("1 call of 96 B"), True),
        ("head 10.1 -> 40.2 KiB per gather", "head 64 B -> 1.0 MiB per gather", True),
        ("head 10.1 -> 40.2 KiB per gather", "head 1.0 MiB -> 64 B per gather", False),
        (
            "head in forward: all_gather[dp] 1 -> 2",
            "head in forward: all_gather[dp] 1 -> 3",
            False,
        ),
        (
            MOVED.format("2 calls"),
            "head split off from unit layers.0: 2 calls",
            False,
        ),
    ],
)
def test_group_of_tests_ignores_their_amounts(before, after, is_same):
    tests = []
    for nodeid, line, cost in zip(SIX, (before, after), COSTS, strict=False):
        tests.append(failed(nodeid, [line], cost=cost))
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
    places = ((FileLine(path="src/a,b/train.py", line=line), text) for line, text in causes)
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
    location = FileLine(path="train.py", line=7)
    tests = [
        dataclasses.replace(one, sent=((location, text),))
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
    other = FailedTest(nodeid="t.py::test_y", reason="died", location=FileLine(path="t.py", line=1))
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


@pytest.mark.parametrize(
    "name",
    ["::stop-commands::x", "##[error]x", "\r::error::x", "\n ::error::x", "\x1b[31m##vso[x]"],
)
def test_names_start_no_commands_in_reports(name):
    """The summary may be printed to the log, and the runner reads the annotations from it."""
    location = FileLine(path=name, line=7)
    test = failed(nodeid=name, changes=(name,), path=name, cost=(name,))
    tests = [
        dataclasses.replace(test, nodeid=f"{name}{number}", reason=name) for number in range(2)
    ]
    tests[0] = dataclasses.replace(tests[0], sent=((location, name),))
    results = outcomes(*tests, unused=(name,), ended_early=name)
    annotations = annotate(results)
    assert annotations
    assert all(line.startswith("::error file=") for line in annotations)
    lines = [line.removeprefix("::error file=") for line in annotations]
    lines += render_summary(results, ORIGIN).splitlines()
    for line in lines:
        assert line.isprintable()
        assert not re.search(r"^\s*::|##\w*\[", line)
