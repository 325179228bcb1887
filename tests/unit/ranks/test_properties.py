"""One list of properties of several ranks."""

import pytest

from pytest_fsdp_comm.ranks.session.verdict import merge_properties


@pytest.mark.parametrize(
    ("by_rank", "merged"),
    [
        ({0: [], 1: []}, []),
        ({0: [("a", 1)], 1: [("a", 1)]}, [("a", 1)]),
        ({0: [("a", 1)], 1: []}, [("a", 1)]),
        ({0: [("a", 1)], 1: [("a", 2)], 2: [("a", 2)]}, [("a (rank 0)", 1), ("a (ranks 1-2)", 2)]),
        ({0: [("a", 1), ("a", 2)], 1: [("a", 1), ("a", 2)]}, [("a", 1), ("a", 2)]),
        ({0: [("b", [1])], 1: [("a", "1"), ("b", [1])]}, [("b", [1]), ("a", "1")]),
        ({0: [("a", 1)], 1: [("a", "1")]}, [("a (rank 0)", 1), ("a (rank 1)", "1")]),
    ],
)
def test_merged_properties_name_ranks_that_differ(by_rank, merged):
    assert merge_properties(by_rank) == merged
