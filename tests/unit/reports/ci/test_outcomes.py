"""Read the commit of a run, and its URLs, from variables of CI."""

import pytest

from pytest_fsdp_comm.reports.ci.outcomes import Origin, Place, read_origin

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
    assert (
        github.line_address(Place(path="a b.py", line=7))
        == "https://github.com/o/r/blob/abc/a%20b.py#L7"
    )
    gitlab = read_origin(GITLAB)
    assert (gitlab.branch, gitlab.top) == ("main", "/builds/o/r")
    assert gitlab.commit_address == "https://gitlab.com/o/r/-/commit/abc"
    assert (
        gitlab.line_address(Place(path="a.py", line=7))
        == "https://gitlab.com/o/r/-/blob/abc/a.py#L7"
    )


@pytest.mark.parametrize(
    "given",
    [{}, GITHUB | {"GITHUB_SHA": ""}, GITLAB | {"CI_PROJECT_URL": "javascript:alert(1)//"}],
)
def test_what_is_unknown_or_no_address_is_no_link(given):
    origin = read_origin(given)
    place = Place(path="a.py", line=1)
    assert (origin.address, origin.commit_address, origin.line_address(place)) == ("", "", "")
