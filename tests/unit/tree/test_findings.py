"""The ini value ``fsdp_comm_findings``."""

import re

import pytest

from pytest_fsdp_comm.tree.findings.rules import CODES, FindingRules, parse_rules


def test_nothing_said_is_the_default():
    assert parse_rules([]) == parse_rules(["", "  "]) == FindingRules()


def test_levels_and_thresholds_are_read_in_order():
    rules = parse_rules(
        [
            "all = off",
            "split-tie=error",
            "padding = warning",
            "small_nbytes = 7",
            "padding_share=.5",
        ]
    )
    on = {code: level for code, level in rules.levels.items() if level != "off"}
    assert on == {"split-tie": "error", "padding": "warning"}
    assert set(rules.levels) == set(CODES)
    assert (rules.small_nbytes, rules.padding_share) == (7, 0.5)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "padding = maybe",
            "fsdp_comm_findings: padding: expected one of error, warning, off, got 'maybe'",
        ),
        (
            "small_nbytes = 1 MiB",
            "fsdp_comm_findings: small_nbytes: expected a whole number of bytes, got '1 MiB'",
        ),
        (
            "padding_share = -1",
            "fsdp_comm_findings: padding_share: expected a share such as 0.1, got '-1'",
        ),
        (
            "paddings = off",
            "fsdp_comm_findings: cannot read 'paddings = off'; expected '<code> = "
            "error|warning|off' with a code of no-root-unit, ",
        ),
        ("padding", "fsdp_comm_findings: cannot read 'padding'; expected '<code> = "),
    ],
)
def test_what_cannot_be_read(line, problem):
    with pytest.raises(ValueError, match="^" + re.escape(problem)):
        parse_rules([line])
