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
    assert session.output.count(told) == 6  # once for each, whatever the number of ranks
    assert "let it call comm_snapshot(allow_unused=True)" in session.output


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
