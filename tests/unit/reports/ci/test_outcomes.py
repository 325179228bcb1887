"""Read the commit of a run, and its URLs, from variables of CI."""

import os
from pathlib import Path

import pytest

from pytest_fsdp_comm.reports.ci.outcomes import FileLine, Origin, read_origin

GITHUB = {
    "GITHUB_SERVER_URL": "https://github.com",
    "GITHUB_REPOSITORY": "o/r",
    "GITHUB_SHA": "abc",
    "GITHUB_REF_NAME": "12/merge",
    "GITHUB_WORKSPACE": "/checkout",
}
GITLAB = {
    "CI_PROJECT_URL": "https://gitlab.com/o/r",
    "CI_COMMIT_SHA": "abc",
    "CI_COMMIT_REF_NAME": "main",
    "CI_PROJECT_DIR": "/builds/o/r",
}


def test_origin_addresses_on_github_and_gitlab():
    github = read_origin(GITHUB | {"GITHUB_HEAD_REF": "faster"})
    assert github == Origin(
        commit="abc", branch="faster", address="https://github.com/o/r", top="/checkout"
    )
    assert github.commit_address == "https://github.com/o/r/commit/abc"
    own = read_origin(GITHUB | {"GITHUB_SERVER_URL": "http://git.local"})
    assert own.address == "http://git.local/o/r"
    run = read_origin(GITHUB | {"GITHUB_RUN_ID": "7"}).run_address
    assert run == "https://github.com/o/r/actions/runs/7#artifacts"
    assert (
        github.line_address(FileLine(path="a b.py", line=7))
        == "https://github.com/o/r/blob/abc/a%20b.py#L7"
    )
    gitlab = read_origin(GITLAB)
    assert (gitlab.branch, gitlab.top) == ("main", "/builds/o/r")
    assert gitlab.commit_address == "https://gitlab.com/o/r/-/commit/abc"
    job = read_origin(GITLAB | {"CI_JOB_ID": "9"}).run_address
    assert job == "https://gitlab.com/o/r/-/jobs/9/artifacts/browse"
    odd = '9"> <'
    for variables in (GITHUB | {"GITHUB_RUN_ID": odd}, GITLAB | {"CI_JOB_ID": odd}):
        assert "/9%22%3E%20%3C" in read_origin(variables).run_address
    assert (
        gitlab.line_address(FileLine(path="a.py", line=7))
        == "https://gitlab.com/o/r/-/blob/abc/a.py#L7"
    )


@pytest.mark.parametrize(
    ("top", "directory"),
    [("/repo", "services/one"), ("/repo/services/one", ""), ("/other", ""), ("", "")],
)
def test_directory_is_relative_to_the_checkout(top, directory):
    assert Origin(top=top).relative_directory(Path("/repo/services/one")) == directory


def test_addresses_hold_bytes_that_are_not_utf8():
    """Linux passes them as lone surrogates, which cannot be encoded as UTF-8."""
    origin = read_origin(GITHUB | {"GITHUB_SHA": os.fsdecode(b"ab\xe9")})
    location = FileLine(path=os.fsdecode(b"caf\xe9/\xc3\xa9.py"), line=7)
    assert origin.line_address(location) == "https://github.com/o/r/blob/ab%E9/caf%E9/%C3%A9.py#L7"
    assert origin.commit_address == "https://github.com/o/r/commit/ab%E9"


@pytest.mark.parametrize(
    "given",
    [
        {"GITHUB_RUN_ID": "7"},
        GITHUB | {"GITHUB_SHA": ""},
        GITLAB | {"CI_PROJECT_URL": "javascript:alert(1)//", "CI_JOB_ID": "9"},
    ],
)
def test_what_is_unknown_or_no_address_is_no_link(given):
    origin = read_origin(given)
    location = FileLine(path="a.py", line=1)
    assert (origin.address, origin.commit_address, origin.line_address(location)) == ("", "", "")
    assert origin.run_address == ""
