"""The page about the tree names every code, level and threshold as they are."""

import re
from pathlib import Path

from pytest_fsdp_comm.fsdp_tree import TreeFactory
from pytest_fsdp_comm.tree.finding import THRESHOLDS, FindingSettings
from pytest_fsdp_comm.tree.findings.rules import RULES, parse_settings
from pytest_fsdp_comm.tree.model import ShardTree

PAGE = (Path(__file__).parents[3] / "docs" / "fsdp-tree.md").read_text(encoding="utf-8")


def test_the_page_lists_all_codes_and_levels_in_order():
    listed = re.findall(r"^\| `([a-z-]+)` \| (error|warning) \|", PAGE, re.MULTILINE)
    assert listed == [(rule.code, rule.level) for rule in RULES]


def test_page_lists_thresholds_with_defaults():
    listed = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", PAGE, re.MULTILINE))
    assert listed == {name: str(getattr(FindingSettings(), name)) for name in THRESHOLDS}


def test_the_ini_example_is_valid():
    (example,) = re.findall(r"fsdp_comm_findings =\n((?:    .*\n)+)", PAGE)
    settings = parse_settings(example.splitlines())
    assert settings.levels["unit-too-small"] == "off"
    assert settings.levels["mixed-frozen"] == "error"
    assert settings.padding_nbytes == 1 << 20


def test_every_name_on_the_page_exists():
    for name in set(re.findall(r"`?fsdp_tree\.(\w+)", PAGE)):
        assert hasattr(TreeFactory, name), name
    for name in set(re.findall(r"`?\btree\.(\w+)", PAGE)) - {"html"}:
        assert hasattr(ShardTree, name), name
