"""The page about the tree names every code, level and threshold as they are."""

import re
from dataclasses import fields
from pathlib import Path

from pytest_fsdp_comm.fsdp_tree import TreeFactory
from pytest_fsdp_comm.tree.findings.rules import CODES, FindingRules, parse_rules
from pytest_fsdp_comm.tree.model import ShardTree

PAGE = (Path(__file__).parents[3] / "docs" / "fsdp-tree.md").read_text(encoding="utf-8")


def test_codes_and_levels():
    listed = re.findall(r"^\| `([a-z-]+)` \| (error|warning) \|", PAGE, re.MULTILINE)
    assert listed == list(CODES.items())


def test_thresholds():
    listed = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", PAGE, re.MULTILINE))
    rules = FindingRules()
    names = [entry.name for entry in fields(rules) if entry.name != "levels"]
    assert listed == {name: str(getattr(rules, name)) for name in names}


def test_the_ini_example_is_valid():
    (example,) = re.findall(r"fsdp_comm_findings =\n((?:    .*\n)+)", PAGE)
    rules = parse_rules(example.splitlines())
    assert rules.levels["unit-too-small"] == "off"
    assert rules.levels["mixed-frozen"] == "error"
    assert rules.padding_share == 0.25


def test_what_is_named_is_there():
    for name in set(re.findall(r"`?fsdp_tree\.(\w+)", PAGE)):
        assert hasattr(TreeFactory, name), name
    for name in set(re.findall(r"`?\btree\.(\w+)", PAGE)) - {"html"}:
        assert hasattr(ShardTree, name), name
