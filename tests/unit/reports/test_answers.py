"""Queries of a recording, and the text of failed assertions about their answers."""

import copy
import json
import pickle
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_fsdp_comm.comm.events import Collective, Phase, Source
from pytest_fsdp_comm.comm.questions import Answer, Question
from pytest_fsdp_comm.reports.assertions import explain_answer
from pytest_fsdp_comm.text.fqn import expand, fold_fqns, make_matcher

NUMBERED = st.lists(
    st.one_of(
        st.integers(0, 12).map(str), st.sampled_from(["layers", "a b", "{1}", "*", "+", "ü"])
    ),
    max_size=4,
).map(".".join)


def collective(
    owner, phase=Phase.FORWARD, kind="all_gather", site="train.py:7", *, received=1000, sent=500
):
    return Collective(
        index=0,
        kind=kind,
        op=f"c10d.{kind}",
        owner=owner,
        issued_in=None,
        phase=phase,
        axis="dp",
        group_size=2,
        dtype="float32",
        nbytes_sent=sent,
        nbytes_received=received,
        source=Source.FSDP,
        call_site=site,
    )


def answer(number, matching=(), recorded=(), expression="counts('all_gather')"):
    return Answer(
        number, expression=expression, matching=matching, recorded=tuple(recorded) or matching
    )


LAYERS = tuple(collective(f"layers.{n}") for n in range(4))


@given(st.sets(NUMBERED, min_size=1, max_size=12), NUMBERED)
def test_owner_pattern_matches_all_its_names(fqns, other):
    for pattern in fold_fqns(fqns):
        matches, meant = make_matcher(pattern), expand(pattern)
        # A star in a name also matches itself.
        assert all(map(matches, meant))
        assert matches(other) == (other in meant) or "*" in pattern


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (
            "layers.*",
            ["layers.0", "layers.abc"],
            ["layers", "layers.0.mlp", "layers.", "layers.0+a"],
        ),
        ("*", ["a"], ["", "a.b"]),
        ("*.{0..3}.mlp*", ["h.3.mlp_1"], ["h.4.mlp_1", "h.03.mlp_1", "h.3.mlp", "x.h.3.mlp_1"]),
        ("a.{0..999999999}", ["a.999999999"], ["a.1000000000"]),
        ("{0..1}.{2,4}", ["0.2", "1.4"], ["0.3", "2.2"]),
        (r"a\x2a", ["a*"], ["ab"]),
        ("a.b", ["a.b"], ["axb"]),
        ("(root)", [""], ["(root)"]),
        ("layers.{0..1}+norm", ["layers.1+norm"], ["layers.1"]),
    ],
)
def test_matcher_matches_whole_names_only(pattern, yes, no):
    assert [name for name in [*yes, *no] if make_matcher(pattern)(name)] == yes


@pytest.mark.parametrize("pattern", ["a.{", "a.}", "a.{1..}", "a.{3..1}", r"\y"])
def test_what_is_no_pattern_is_refused_as_by_expand(pattern):
    with pytest.raises(ValueError) as by_expand:  # noqa: PT011  # the text is what is compared
        expand(pattern)
    with pytest.raises(ValueError, match=re.escape(str(by_expand.value))):
        make_matcher(pattern)


def test_answer_is_int_and_arithmetic_gives_plain_int():
    count = answer(4, LAYERS)
    assert isinstance(count, int)
    assert (repr(count), str(count), f"{count:03}", f"{count!r}", json.dumps([count])) == (
        ("4", "4", "004", "4", "[4]")
    )
    assert {count: "x"}[4] == "x"
    assert [*range(count)] == [0, 1, 2, 3]
    assert bool(count)
    assert not answer(0)
    copies = (copy.deepcopy(count), pickle.loads(pickle.dumps(count)))  # noqa: S301  # by other plugins
    calculated = (count + 1, 1 + count, count + count, -count, +count, abs(count), count // 2)
    for plain in (*copies, *calculated, sum([count, count]), int(count)):
        assert type(plain) is int


def test_a_question_is_shown_as_users_write_it():
    assert str(Question()) == ""
    asked = Question(kind="send", phase=Phase.FORWARD, owner="", axis="dp")
    assert str(asked) == "'send', phase='forward', owner='', axis='dp'"


def test_explain_answer_folds_siblings_not_call_sites():
    events = (
        collective(None, Phase.OPTIMIZER, "all_reduce", site=""),
        *LAYERS,
        collective("layers.1", Phase.BACKWARD),
        collective(""),
        collective("layers.3", site="train.py:9"),
    )
    assert explain_answer("==", answer(8, events), 9) == [
        "8 == 9, where 8 is counts('all_gather')",
        "forward (root) all_gather[dp] x1 of 1_000 B at train.py:7",
        "forward layers.{0..3} all_gather[dp] x1 of 1_000 B at train.py:7",
        "forward layers.3 all_gather[dp] x1 of 1_000 B at train.py:9",
        "backward layers.1 all_gather[dp] x1 of 1_000 B at train.py:7",
        "optimizer (no-module) all_reduce[dp] x1 of 1_000 B",
    ]


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        # Neither is 2_048 B each.
        ([512] * 4, "x4 of 512 B"),
        ([512, 1536], "x1 of 512 B, x1 of 1_536 B"),
        ([64, 8, 64], "x1 of 8 B, x2 of 64 B"),
        ([1, 2, 3], "x1 of 1 B, x1 of 2 B, x1 of 3 B"),
        ([5, 2, 3, 1, 1], "x5 of 1 to 5 B"),
        # A barrier.
        ([0, 0], "x2"),
    ],
)
def test_bytes_are_always_those_of_one_call(sizes, shown):
    events = tuple(
        collective(owner, received=size, sent=0) for owner in ("a.0", "a.1") for size in sizes
    )
    other = collective("a.2", received=sum(sizes), sent=0)
    assert explain_answer("==", answer(0, (*events, other)), 1)[1:] == [
        f"forward a.{{0..1}} all_gather[dp] {shown} at train.py:7",
        f"forward a.2 all_gather[dp] x1{f' of {sum(sizes):_} B' if sum(sizes) else ''} at "
        "train.py:7",
    ]


def test_explain_answer_no_match_lists_recording():
    assert explain_answer("!=", 0, answer(0, recorded=LAYERS[:1])) == [
        "0 != 0, where 0 is counts('all_gather')",
        "nothing matches; the recording has:",
        "forward layers.0 all_gather[dp] x1 of 1_000 B at train.py:7",
    ]
    assert explain_answer("in", answer(0), {1})[1:] == ["the recording has no collectives"]


def test_an_explanation_fills_no_more_than_a_screen():
    many = tuple(collective(f"block_{chr(97 + n)}") for n in range(26))
    lines = explain_answer("==", answer(26, many), 2)
    assert len(lines) == 21
    assert lines[-1] == "... and 7 more; comm_mode.events has all"
    both = explain_answer("==", answer(26, many), answer(26, many))
    assert len(both) == 23
    exact = explain_answer("==", answer(20, many[:20]), 2)
    assert exact[-1].startswith("forward block_t ")


def test_asking_needs_no_torch_and_no_pytest():
    code = (
        "import sys, pytest_fsdp_comm.comm.questions, pytest_fsdp_comm.reports.assertions; "
        "sys.exit(bool({'torch', 'pytest', 'difflib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
