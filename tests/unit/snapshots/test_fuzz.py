"""Mutated snapshots are refused, or read exactly."""

import fuzzing
import pytest


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["comm", "tree"])
def test_mutated_snapshot_is_refused_or_round_trips(kind):
    found = fuzzing.fuzz(kind, mutations=1_500, seed=1)  # `nox -s fuzz` makes 50,000
    assert sum(found.values()) == 1_500
    # The mutations reach both sides.
    assert found["refused"] > 1_000
    assert found["other"] > 15
    assert found["same"] > 15


@pytest.mark.parametrize("kind", ["comm", "tree"])
def test_the_documents_themselves_are_read(kind):
    for text in {"comm": fuzzing.COMM, "tree": fuzzing.TREE}[kind]:
        assert fuzzing.check(kind, text, text) == "same"


@pytest.mark.parametrize(
    "message",
    ["x.comm: broken", "dir/x.comm, line 3: broken", "dir/x.comm, line 3: " + "x" * 700],
)
def test_an_error_without_file_line_or_remedy_is_found(message):
    with pytest.raises(AssertionError):
        fuzzing.check_error(message)
