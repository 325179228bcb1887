"""Escapes, patterns and order of FQNs."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_fsdp_comm.text.fqn import (
    escape,
    expand,
    fold_fqns,
    name_owners,
    natural_key,
    unescape,
)

TRICKY = ["{", "}", "..", " ", "\t", "\n", "\\", "+", "#", "(root)", "{0..3}", "\\x20", "\ud800"]
SEGMENTS = st.one_of(
    st.integers(0, 12).map(str),
    st.sampled_from(["layers", "mlp", "experts", "007", "1_000", "9" * 30, *TRICKY]),
    st.text(),
)
FQNS = st.lists(SEGMENTS, max_size=5).map(".".join)


@given(FQNS)
@example("")
@example("(root)")
@example("\u2028")
@example("\U0001f600\U000e0001")
def test_escaping_round_trips_in_one_printable_word(fqn):
    text = escape(fqn)
    assert unescape(text) == fqn
    assert text.isprintable()
    assert text.split() == [text]
    assert "#" not in text
    assert ("(" in text) == (fqn == "")


@given(st.sets(FQNS, max_size=40))
@example({"layers.0", "layers.1", "layers.01", "layers.+1"})
@example({"", "0", "1"})
def test_folding_partitions_the_names(fqns):
    patterns = fold_fqns(fqns)
    expanded = [fqn for pattern in patterns for fqn in expand(pattern)]
    assert sorted(expanded) == sorted(fqns)
    assert fold_fqns(sorted(fqns, reverse=True)) == patterns
    assert all(pattern.split() == [pattern] for pattern in patterns)


@pytest.mark.parametrize(
    ("fqns", "patterns"),
    [
        ([f"layers.{i}.mlp.weight" for i in range(80)], ["layers.{0..79}.mlp.weight"]),
        (["layers.10", "layers.2", "layers.3", "layers.7"], ["layers.{2..3,7,10}"]),
        (
            [f"l.{i}.e.{j}.w" for i in range(4) for j in range(8 if i < 3 else 4)],
            ["l.{0..2}.e.{0..7}.w", "l.3.e.{0..3}.w"],
        ),
        (["layers.0+norm", "layers.1+norm"], ["layers.{0..1}+norm"]),
        (["", "a"], ["(root)", "a"]),
        (["b", "a", "b"], ["a", "b"]),
        (["layers.00", "layers.1"], ["layers.00", "layers.1"]),
        (["3"], ["3"]),
        (["a b.{1}"], ["a\\x20b.\\x7b1\\x7d"]),
    ],
)
def test_numbered_siblings_fold_into_patterns(fqns, patterns):
    assert list(fold_fqns(fqns)) == patterns
    assert sorted(fqn for pattern in patterns for fqn in expand(pattern)) == sorted({*fqns})


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["", "a.0", "a.1"], "(root), a.{0..1}"),
        (list("abcdef"), "a, b, c and 3 more"),
        (list("abcdefg"), "7 modules of the model"),
        ([f"{top}.{name}" for top in "ab" for name in "pqrs"], "8 modules in a, b"),
        (["", *(f"a.{name}.{name}" for name in "pqrstu")], "7 modules in (root), a"),
        ([None, *(f"a.{name}" for name in "pqrstu")], "6 modules in a and (no-module)"),
        (["a+b", *(f"a.{name}" for name in "pqrstu")], "7 modules in a, b"),
    ],
)
def test_many_patterns_are_named_by_what_contains_them(names, text):
    assert name_owners(names) == text


def test_100_000_siblings_are_one_pattern():
    fqns = [f"experts.{i}.w" for i in range(100_000)]
    assert fold_fqns(fqns) == ("experts.{0..99999}.w",)
    assert list(expand("experts.{0..99999}.w")) == fqns


def test_natural_order_sorts_numbers_by_value():
    fqns = ["", "layers", "layers.2", "layers.2.a", "layers.10", "layers2", "layers10", "norm"]
    shuffled = fqns[::2] + fqns[1::2]
    assert sorted(shuffled, key=natural_key) == fqns


@given(st.lists(FQNS, unique=True).flatmap(lambda fqns: st.tuples(*[st.permutations(fqns)] * 2)))
def test_natural_order_is_total(orders):
    first, second = orders
    assert sorted(first, key=natural_key) == sorted(second, key=natural_key)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("layers.{0..3", "unpaired '{' in 'layers.{0..3': expected e.g. layers.{0..3}"),
        ("layers.0}", "unpaired '}' in 'layers.0}': expected e.g. layers.{0..3}"),
        (
            "l.{}",
            "bad numbers {} in 'l.{}': expected ascending numbers and ranges such as {0..3,7}",
        ),
        ("l.{3..1}", "bad numbers {3..1} in 'l.{3..1}'"),
        ("l.{1,1}", "bad numbers {1,1} in 'l.{1,1}'"),
        ("l.{00..3}", "bad numbers {00..3} in 'l.{00..3}'"),
        (
            "l.{0..99999}.{0..99999}",
            "'l.{0..99999}.{0..99999}' expands to too many names: expected at most 131072",
        ),
        ("a\\q", r"bad escape at column 2 of 'a\\q': expected \xHH, \uHHHH or \UHHHHHHHH"),
        ("a\\Uffffffff", r"bad escape at column 2 of"),
    ],
)
def test_invalid_pattern_error_says_why(pattern, problem):
    with pytest.raises(ValueError, match="^" + re.escape(problem)):
        expand(pattern)
