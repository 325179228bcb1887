"""Workflow commands of GitHub: their form, their escapes, and how many there are."""

import dataclasses
import re

import pytest

from pytest_fsdp_comm.reports.ci.annotations import annotate
from pytest_fsdp_comm.reports.ci.outcomes import (
    Comparisons,
    FailedTest,
    Outcomes,
    Place,
    UnusedFile,
)


def failed(name="test_x", place=Place(path="tests/test_a.py", line=3)):  # noqa: B008  # frozen
    comparisons = Comparisons(
        files=("a.comm",),
        headline="100 % more: a, b",
        story=("comm_mode differs", "  +63 % bytes"),
        accept="pytest -k x",
    )
    return FailedTest(
        nodeid=f"tests/test_a.py::{name}",
        reason=comparisons.headline,
        place=place,
        comparisons=comparisons,
    )


def outcomes(*tests, **fields):
    return Outcomes(compared_tests=1, compared_files=1, failed=tests, **fields)


def test_a_command_names_file_line_title_and_the_whole_story_on_one_line():
    assert annotate(outcomes(failed("test_x[a,b:c\n%]"))) == [
        "::error file=tests/test_a.py,line=3,"
        "title=test_x[a%2Cb%3Ac%0A%25]%3A 100 %25 more%3A a%2C b::"
        "comm_mode differs%0A  +63 %25 bytes%0Aaccept: pytest -k x"
    ]
    assert annotate(outcomes(failed(place=None)))[0].startswith("::error title=test_x")


def test_other_failures_are_annotated_with_their_reason():
    test = FailedTest(nodeid="t.py::test_x", reason="rank 1 died", place=None)
    assert annotate(outcomes(test)) == ["::error title=test_x%3A rank 1 died::rank 1 died"]
    assert annotate(outcomes()) == []


def test_the_tenth_annotation_counts_those_that_github_would_drop():
    ten = annotate(outcomes(*[failed(f"test_{number}") for number in range(10)]))
    assert len(ten) == 10
    assert not any("more in the log" in one for one in ten)
    many = annotate(outcomes(*[failed(f"test_{number}") for number in range(25)]))
    assert len(many) == 10
    assert many[-1] == (
        "::error title=communication::16 more in the log and in the summary of the step"
    )


def test_unused_files_are_errors_if_they_fail_the_session_and_silent_once_deleted():
    unused = tuple(
        UnusedFile(shown=f"s/{number}.comm", reason="gone", place=Place(path="s/x.comm", line=1))
        for number in range(12)
    )
    errors = annotate(outcomes(failed(), unused=unused, fails_for_unused=True))
    assert len(errors) == 10
    assert all(one.startswith("::error ") for one in errors)
    assert re.match(
        "::error file=s/x.comm,line=1,title=unused communication snapshot::s/0", errors[1]
    )
    mixed = annotate(outcomes(failed(), unused=unused))
    assert [one.split(" ")[0] for one in mixed] == ["::error", *["::warning"] * 10]
    assert annotate(outcomes(unused=unused, are_removed=True)) == []


@pytest.mark.parametrize(
    ("nodeid", "name"),
    [
        ("tests/test_a.py::TestA::test_b[x::y-[z]::1]", "test_b[x::y-[z]::1]"),
        ("tests/[odd]/test_a.py::test_b", "test_b"),
        ("tests/test_a.py::TestA::test_b", "test_b"),
    ],
)
def test_a_title_contains_the_full_test_name(nodeid, name):
    (line,) = annotate(outcomes(dataclasses.replace(failed(), nodeid=nodeid)))
    assert f"title={name.replace(':', '%3A')}%3A " in line


def test_a_long_story_is_cut_with_a_count_of_the_rest():
    story = tuple(f"{number:_>9}" for number in range(1000))
    test = failed()
    comparisons = dataclasses.replace(test.comparisons, story=story, accept="")
    (line,) = annotate(outcomes(dataclasses.replace(test, comparisons=comparisons)))
    message = line.rpartition("::")[2].replace("%0A", "\n")
    assert len(message) <= 4000
    kept, _, rest = message.rpartition("\n... and ")
    assert rest == f"{len(chr(10).join(story)) - len(kept):_} more characters"
