"""A test that requests ``comm_snapshot`` and compares nothing fails."""

import re

import pytest

SESSION = """
import atexit

import pytest
import torch
import torch.distributed as dist

ranks = pytest.mark.distributed(world_size=2)
kept = pytest.mark.distributed(world_size=2, scope="module")

def send(comm_mode):
    with comm_mode:
        dist.all_reduce(torch.ones(4))

class Holder:
    pass

@pytest.fixture
def holder():
    holder = Holder()
    yield holder
    assert holder.comm_mode == holder.snapshot

@pytest.fixture
def guard(comm_mode, comm_snapshot):
    yield
    assert comm_mode == comm_snapshot

@pytest.fixture
def optional(comm_snapshot):
    return comm_snapshot(allow_unused=True)

@ranks
def test_returns_FAILED(comm_snapshot):
    return

@ranks
def test_requests_on_one_rank_FAILED(request, dist_info):
    if dist_info.rank == 1:
        request.getfixturevalue("comm_snapshot")

@pytest.mark.distributed(world_size=8, simulate=True)
def test_simulated_FAILED(comm_snapshot):
    pass

@ranks
def test_atexit_FAILED(comm_mode, comm_snapshot):
    send(comm_mode)
    atexit.register(lambda: comm_mode == comm_snapshot)

@kept
def test_kept_ranks_FAILED(comm_snapshot):
    pass

@kept
def test_after_it_PASSED(comm_mode, comm_snapshot):
    send(comm_mode)
    assert comm_mode == comm_snapshot
    atexit.register(lambda: comm_mode == comm_snapshot)

@ranks
def test_helper_PASSED(comm_mode, guard):
    send(comm_mode)

@ranks
def test_compared_by_an_older_fixture_PASSED(holder, comm_mode, comm_snapshot):
    send(comm_mode)
    holder.comm_mode, holder.snapshot = comm_mode, comm_snapshot

@ranks
def test_opts_out_PASSED(optional):
    pass

@ranks
def test_skips_SKIPPED(comm_snapshot):
    pytest.skip("nothing to compare")

@ranks
def test_skips_subtest_PASSED(comm_snapshot, subtests):
    with subtests.test("comparison"):
        pytest.skip("nothing to compare")

@ranks
@pytest.mark.xfail
def test_xfail_XFAIL(comm_snapshot):
    assert False

@ranks
def test_other_FAILED(comm_snapshot):
    raise LookupError("another reason")

def test_plain_PASSED_ERROR(comm_snapshot):
    pass

def test_plain_opts_out_PASSED(optional):
    pass

def test_plain_skips_SKIPPED(comm_snapshot):
    pytest.skip("nothing to compare")

def test_plain_other_FAILED(comm_snapshot):
    raise LookupError("another reason")
"""


@pytest.fixture(scope="module")
def session(run_session):
    return run_session(SESSION, "--snapshot-update", "-rA", "-p", "no:randomly")


def test_each_test_has_the_outcome_in_its_name(session):
    outcomes = {}
    for outcome, name in re.findall(r"(?m)^([A-Z]+) test_it\.py::(\w+)", session.output):
        outcomes.setdefault(name, []).append(outcome)
    names = re.findall(r"(?m)^def (test_\w+)", SESSION)
    for name in names:
        # pytest lists skipped tests by their lines.
        expected = "_".join(outcomes.get(name, ["SKIPPED"]))
        assert name.endswith(f"_{expected}"), session.output


def test_failure_says_what_to_do(session):
    told = "comm_snapshot was requested but never compared, so this test passes whatever is sent:\n"
    assert session.output.count(told) == 6  # once per test, for any number of ranks
    assert "let the fixture call comm_snapshot(allow_unused=True)" in session.output


def test_comparison_after_the_test_is_named(session):
    for name in ("test_atexit_FAILED", "test_after_it_PASSED"):
        assert f"comm_snapshot was compared after {name} had ended" in session.output


def test_setup_only_compares_nothing(run_session):
    source = """
        import pytest

        def test_plain(comm_snapshot): pass

        @pytest.mark.distributed(2)
        def test_ranks(comm_snapshot): pass
    """
    assert run_session(source.replace("\n        ", "\n"), "--setup-only").status == 0


def test_failed_or_skipped_tests_get_no_second_error(run_session):
    # Without an update, which writes nothing for them in any case.
    output = run_session(SESSION, "-k", "skips or xfail or other").output
    assert re.search(r" 2 failed, .* 1 xfailed", output), output[-500:]
    assert "never compared" not in output


UNASSERTED = """
import pytest
import torch
import torch.distributed as dist

COUNT = 1
pytestmark = pytest.mark.distributed(world_size=2)

@pytest.fixture
def sent(comm_mode):
    with comm_mode:
        for _ in range(COUNT):
            dist.all_reduce(torch.ones(2))
    return comm_mode

def test_bare_FAILED(sent, comm_snapshot):
    sent == comm_snapshot

def test_kept_FAILED(sent, comm_snapshot):
    is_same = sent == comm_snapshot

def test_dict_FAILED(sent, comm_snapshot):
    if {"comm": sent} == comm_snapshot:
        return

def test_two_FAILED(sent, comm_mode, comm_snapshot):
    sent == comm_snapshot(name="changed")
    with comm_mode:
        dist.all_reduce(torch.ones(2))
    assert comm_mode == comm_snapshot(name="same")

@pytest.mark.xfail
def test_expected_XFAIL(sent, comm_snapshot):
    sent == comm_snapshot

def test_caught_FAILED(sent, comm_snapshot):
    with pytest.raises(AssertionError):
        assert sent == comm_snapshot

def test_other_FAILED(sent, comm_snapshot):
    sent == comm_snapshot
    assert COUNT == 1, "another reason"

def test_unequal_FAILED(sent, comm_snapshot):
    assert {"comm": sent} != comm_snapshot
"""


def test_comparison_without_assert_is_explained(pytester):
    file = pytester.makepyfile(test_it=UNASSERTED)
    arguments = ("-rA", "-p", "no:randomly", "--comm-summary=s.md")
    first = pytester.runpytest_subprocess("--snapshot-update", *arguments)
    # Equal comparisons print nothing. One test expects a difference, and one excludes it.
    first.assert_outcomes(passed=5, failed=2, xpassed=1)
    assert "where the test ignored" not in first.stdout.str()
    file.write_text(UNASSERTED.replace("COUNT = 1", "COUNT = 2"))
    again = pytester.runpytest_subprocess(*arguments)
    for outcome, name in re.findall(r"(?m)^([A-Z]+) test_it\.py::(\w+)", again.stdout.str()):
        assert name.endswith(outcome), again.stdout.str()
    text = again.stdout.str()
    for name in ("bare", "kept", "dict", "two"):
        failure = re.search(rf"_ test_{name}_FAILED _+\n((?:.+\n)*?)_", text)[1]
        assert re.fullmatch(
            rf"comm_mode differs from snapshots/test_it/test_{name}_FAILED\S+\n"
            r"  \(no-module\) outside forward and backward: all_reduce\[world\] 1 -> 2 .*, "
            r"called from test_it\.py:13\n"
            r"  cost: \+100 % bytes in all_reduce\[world\] \(8 -> 16 B per rank\)\n"
            rf'  accept: pytest --snapshot-update "test_it\.py::test_{name}_FAILED"\n'
            r"  compared at test_it\.py:\d+, where the test ignored the result: assert it\n",
            failure,
        ), failure
    assert text.count("where the test ignored the result") == 4
    assert text.count("test_caught_FAILED.ws2.comm failed, but the test continued: the") == 1
    assert text.count("comm_snapshot was compared with !=, which would pass for any different") >= 1
    # Once in the table, in CI too.
    assert "differs from the reviewed snapshots in 4 tests" in (pytester.path / "s.md").read_text()
