"""Verify what sentences say against the rows of random pairs of profiles.

The checks read the text and count rows themselves. They share no code with the sentences.
"""

import itertools
import random
import re
from fractions import Fraction

import pytest
from sample_profiles import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    accumulated,
    changed,
    counted,
    evaluated,
    frozen,
    in_bfloat16,
    kept,
    larger_batch,
    made,
    more_layers,
    profile,
    recomputed,
    reduced_often,
    renamed,
    row,
    times,
    twice,
    unit,
)

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.text.fqn import expand

PASSES = {FORWARD, BACKWARD, RECOMPUTE}


def logged(old):
    return made([*old.rows, row(Phase.OUTSIDE, None, "all_reduce", 4)])


def without_root(old):
    return changed(old, lambda one: None if one.owner == "" else one)


def with_head(old):
    return made([*old.rows, *unit("head", 512)])


def called_twice(old):
    names = {one.owner for one in old.rows if (one.owner or "").endswith(".1")}
    return changed(old, lambda one: times(one, 2) if one.owner in names else one)


def waiting(old):
    """The host waits once more where it waited before, and somewhere else."""
    more = changed(old, lambda one: times(one, 2) if one.what == "item" else one)
    return made([*more.rows, counted("host_wait", Phase.OUTSIDE, "", "synchronize", 3)])


CHANGES = [
    waiting,
    more_layers,
    renamed,
    twice,
    accumulated,
    larger_batch,
    in_bfloat16,
    kept,
    reduced_often,
    frozen,
    recomputed,
    evaluated,
    logged,
    without_root,
    with_head,
    called_twice,
]


class Facts:
    """Counts of one pair, under the new names of modules."""

    def __init__(self, old, new, text):
        name = re.search(r"module (\S+) renamed to (\S+)", text)
        self.sides = [{}, {}]
        for side, profile_of_side in zip(self.sides, (old, new), strict=True):
            for one in profile_of_side.rows:
                owner = one.owner
                if name and side is self.sides[0] and owner:
                    prefix, target = (part.partition(".*")[0] for part in name.groups())
                    owner = re.sub(rf"^{re.escape(prefix)}(?=\.|$)", target, owner)
                calls = sorted(
                    (call.nbytes, call.dtype, call.role, call.count) for call in one.calls
                )
                side[owner, one.subject, one.phase, one.what, one.axis] = calls

    def select(self, matches):
        return [
            {key: calls for key, calls in side.items() if matches(key, calls[0][2])}
            for side in self.sides
        ]

    def is_unchanged(self, matches):
        old, new = self.select(matches)
        return old == new

    def factors(self, matches):
        """The factors of all rows that both sides have."""
        old, new = ({key: count(calls) for key, calls in s.items()} for s in self.select(matches))
        owners = {key[0] for key in old} & {key[0] for key in new}
        return {Fraction(new.get(key, 0), n) for key, n in old.items() if key[0] in owners}


def count(calls):
    return sum(call[3] for call in calls)


def factor_of(text):
    return Fraction({"twice": "2", "half": "1/2"}.get(text) or text.removesuffix(" times"))


def names_in(text):
    text = text.removeprefix("modules ").removeprefix("module ")
    parts = re.split(r", (?![^{]*\})", text)
    return {owner for part in parts for owner in expand(part)}


def is_gather(key, role_name):
    return key[3] == "all_gather" and role_name == "parameters"


def is_reduction(key, role_name):
    return key[2] in PASSES and role_name == "gradients"


CHECKS = []


def check_of(pattern):
    """Register a check for lines that match; it gets the match and the facts."""

    def register(function):
        CHECKS.append((re.compile(pattern), function))
        return function

    return register


@check_of(r"gradients of (.+?) (?:are |now |no longer |reduced ).*, gathers unchanged")
def gathers_are_unchanged(match, facts):
    who = names_in(match[1])
    assert facts.is_unchanged(lambda key, name: key[0] in who and is_gather(key, name))


@check_of(r"gradients of (.+?) (?:now |no longer )?reduced .*, gathered as often as before")
def gathers_are_as_many(match, facts):
    who = names_in(match[1])
    assert facts.factors(lambda key, name: key[0] in who and is_gather(key, name)) == {1}


@check_of(r"gradients of (.+?) (?:are )?no longer reduced (?:over (\S+)|\()")
def reductions_are_gone(match, facts):
    who = names_in(match[1])
    _, new = facts.select(is_reduction)
    assert not [key for key in new if key[0] in who and match[2] in {None, key[4]}]


@check_of(r"gradients of (.+?) (?:are )?reduced (\d+) -> (\d+) times")
def reductions_are_counted(match, facts):
    who = names_in(match[1])
    for side, number in zip(facts.select(is_reduction), match.groups()[1:], strict=True):
        assert {count(calls) for key, calls in side.items() if key[0] in who} == {int(number)}


@check_of(
    r"outside forward and backward: the host waits for the GPU (\d+) -> (\d+) times \((\w+)\)"
)
def host_waits_are_counted(match, facts):
    waits = facts.select(lambda key, _: key[1:4] == ("host_wait", Phase.OUTSIDE, match[3]))
    assert [sum(map(count, side.values())) for side in waits] == [int(match[1]), int(match[2])]


@check_of(r"outside forward and backward: the host no longer waits for the GPU \((\w+)\)")
def host_waits_are_gone(match, facts):
    _, new = facts.select(lambda key, _: key[1:4] == ("host_wait", Phase.OUTSIDE, match[1]))
    assert not new


@check_of(r"(all calls|activation calls): (.+) as many$")
def counts_are_multiplied(match, facts):
    is_all = match[1] == "all calls"
    factors = facts.factors(lambda _, name: is_all or name == "activations")
    assert factors == {factor_of(match[2])}


@check_of(
    r"(?:all forward and backward calls|forwards and backwards): (.+?) as many(?!.*apart from)"
)
def passes_are_multiplied(match, facts):
    sent = facts.factors(lambda key, name: key[2] in PASSES and key[4] and name != "gradients")
    assert sent == {factor_of(match[1])}


@check_of(r"gradient reductions(?:: (.+?) as many| (unchanged|as often as before))")
def other_reductions_are_multiplied(match, facts):
    assert facts.factors(is_reduction) == {factor_of(match[1]) if match[1] else 1}
    assert match[2] != "unchanged" or facts.is_unchanged(is_reduction)


@check_of(
    r"forward calls: (.+?) as many(?!.*apart from)(?:.*gathers of (.+) (?:unchanged|as often))?"
)
def forward_is_multiplied(match, facts):
    owners = names_in(match[2]) if match[2] else set()
    rows = facts.factors(lambda key, _: key[2] is FORWARD and key[4] and key[0] not in owners)
    assert rows == {factor_of(match[1])}


@check_of(r"; gathers of (.+) (unchanged|as often as before|changed otherwise) \(not resharded")
def other_gathers_are_equal(match, facts):
    owners = names_in(match[1])

    def is_of_owners(key, name):
        return key[0] in owners and is_gather(key, name)

    assert (facts.factors(is_of_owners) == {1}) == (match[2] != "changed otherwise")
    assert facts.is_unchanged(is_of_owners) == (match[2] == "unchanged")


@check_of("backward calls unchanged")
def backward_is_unchanged(_match, facts):
    assert facts.is_unchanged(lambda key, _: key[2] is BACKWARD)


@check_of("forward unchanged")
def forward_is_unchanged(_match, facts):
    assert facts.is_unchanged(lambda key, _: key[2] is FORWARD and key[4])


@check_of(r"(.+?) no longer gathered(?: or reduced)?(?:, gathers of other units (.+))?$")
def gathers_are_gone(match, facts):
    who = names_in(match[1])
    _, new = facts.select(is_gather)
    assert not [key for key in new if key[0] in who and key[2] is FORWARD]
    is_all = match[2] != "unchanged in forward"
    assert not match[2] or facts.is_unchanged(
        lambda key, name: (
            key[0] not in who and is_gather(key, name) and (is_all or key[2] is FORWARD)
        )
    )


@check_of(r"(.+) no longer gathered or reduced in backward")
def backward_is_gone(match, facts):
    who = names_in(match[1])
    _, new = facts.select(lambda _, name: name in {"parameters", "gradients"})
    assert not [key for key in new if key[0] in who and key[2] is BACKWARD]


@check_of(r"(.+) no longer gathered in backward$")
def gathers_of_backward_are_gone(match, facts):
    who = names_in(match[1])
    _, new = facts.select(is_gather)
    assert not [key for key in new if key[0] in who and key[2] is BACKWARD]


@check_of(r"(.+) now gathered(?: and reduced)?, gathers of other units unchanged( in forward)?:")
def other_units_are_unchanged(match, facts):
    who = names_in(match[1])
    assert facts.is_unchanged(
        lambda key, name: (
            key[0] not in who and is_gather(key, name) and (key[2] is FORWARD or not match[2])
        )
    )


@check_of(r"(.+?) (?:now|no longer) (?:gathered|resharded).*: [+-]?(\d+) calls?\b")
def added_gathers_are_counted(match, facts):
    who = names_in(match[1])
    is_backward = "in backward" in match[0]
    old, new = (
        sum(
            count(calls)
            for key, calls in side.items()
            if key[0] in who and (key[2] is BACKWARD or not is_backward)
        )
        for side in facts.select(
            lambda key, name: (
                is_gather(key, name) or ("and reduced" in match[0] and is_reduction(key, name))
            )
        )
    )
    assert abs(new - old) == int(match[2])


@check_of(r"(.+) gathered (?:(\d+) -> )?(\d+) times in forward, like")
def gathers_are_counted(match, facts):
    who = names_in(match[1])
    numbers = match[2] or match[3], match[3]
    for side, number in zip(facts.select(is_gather), numbers, strict=True):
        rows = [calls for key, calls in side.items() if key[0] in who and key[2] is FORWARD]
        assert {count(calls) for calls in rows} == {int(number)}


@check_of(r"(.+) gathered (?:(\d+) -> )?(\w+)(?: times)? in forward, other units (\w+)")
def gathers_are_compared(match, facts):
    own, others = (1 if text == "once" else int(text) for text in match.groups()[2:])
    old, new = facts.select(lambda key, name: is_gather(key, name) and key[2] is FORWARD)
    who = names_in(match[1])
    before = {count(calls) for key, calls in old.items() if key[0] in who}
    assert not match[2] or before == {int(match[2])}
    assert {count(calls) for key, calls in new.items() if key[0] in who} == {own}
    assert max(count(calls) for key, calls in new.items() if key[0] not in who) == others


@check_of(r"recomputation no longer repeats the forward collectives of (.+)")
def recomputation_is_gone(match, facts):
    who = names_in(match[1])
    _, new = facts.select(lambda key, _: key[2] is RECOMPUTE)
    assert not [key for key in new if key[0] in who]


@check_of(r"no more collectives (?:in|over) (\S+)")
def phase_or_axis_is_gone(match, facts):
    _, new = facts.select(lambda key, _: bool(key[4]))
    assert not [key for key in new if match[1] in {key[2], key[4]}]


def check(line, facts):
    """Verify all claims of a line; return how many there were."""
    matches = [(pattern.match(line) or pattern.search(line), run) for pattern, run in CHECKS]
    found = [(match, run) for match, run in matches if match]
    for match, run in found:
        run(match, facts)
    claim = re.search(r"unchanged|as before|no longer (?!resharded|prefetched)", line)
    assert found or not claim, f"no check reads this claim: {line}"
    return len(found)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.release) for seed in (1, 2))]
)
def test_claims_hold_for_both_recordings(seed):
    chance = random.Random(seed)  # noqa: S311  # profiles are no secrets
    checked = 0
    for size in (1, 2, 3):
        chosen = list(itertools.permutations(CHANGES, size))
        for changes in chance.sample(chosen, min(len(chosen), 120)):
            old = profile(chance.randint(2, 4), tensor_parallel=chance.random() < 0.5)
            if chance.random() < 0.4:
                waits = counted("host_wait", Phase.OUTSIDE, "", "item", chance.randint(1, 3))
                old = made([*old.rows, waits])
            new = old
            for change in changes:
                if not (change is more_layers and renamed in changes):
                    new = change(new)
            if chance.random() < 0.4:
                old, new = new, old
            lines = compare(old, new).sentences
            facts = Facts(old, new, "\n".join(lines))
            for line in lines:
                try:
                    checked += check(line, facts)
                except AssertionError as error:
                    names = [change.__name__ for change in changes]
                    raise AssertionError(f"{names}: {lines}: {line}: {error}") from None
    assert checked > 250


def test_check_detects_a_false_claim():
    old = profile()
    facts = Facts(old, twice(old), "")
    with pytest.raises(AssertionError):
        check("all calls: 3 times as many", facts)
    with pytest.raises(AssertionError):
        check(
            "gradients of layers.{0..2} now reduced (reduce_scatter[dp]), gathers unchanged", facts
        )
    with pytest.raises(AssertionError, match="no check reads"):
        check("everything is as before", facts)
