"""The ini value ``fsdp_comm_findings``."""

import re

import pytest

from pytest_fsdp_comm.tree.finding import FindingSettings
from pytest_fsdp_comm.tree.findings.rules import RULES, parse_settings


def test_nothing_said_is_the_default():
    assert parse_settings([]) == parse_settings(["", "  "]) == FindingSettings()


def test_levels_and_thresholds_are_read_in_order():
    settings = parse_settings(
        [
            "all = off",
            "split-tie=error",
            "padding = warning",
            "small_nbytes = 7",
            "padding_nbytes=5",
        ]
    )
    on = {code: level for code, level in settings.levels.items() if level != "off"}
    assert on == {"split-tie": "error", "padding": "warning"}
    assert set(settings.levels) == {rule.code for rule in RULES}
    assert (settings.small_nbytes, settings.padding_nbytes) == (7, 5)


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
            "padding_nbytes = -1",
            "fsdp_comm_findings: padding_nbytes: expected a whole number of bytes, got '-1'",
        ),
        (
            "paddings = off",
            "fsdp_comm_findings: cannot read 'paddings = off'; expected '<code> = "
            "error|warning|off' or '<threshold> = <bytes>', such as small_nbytes = 4096. "
            "Codes: all, no-root-unit, ",
        ),
        ("padding", "fsdp_comm_findings: cannot read 'padding'; expected '<code> = "),
    ],
)
def test_a_line_that_cannot_be_read_is_refused(line, problem):
    with pytest.raises(ValueError, match="^" + re.escape(problem)):
        parse_settings([line])
