"""The grammar on the page about snapshots matches the written snapshots."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "snapshots.md").read_text()
GRAMMAR = PAGE.partition("## Grammar")[2].partition("```text\n")[2].partition("```")[0]
RULES = dict(re.findall(r"(?m)^(\w+): (.+)$", GRAMMAR))


def pattern(rule):
    return re.sub(r"<(\w+)>", lambda name: f"(?:{pattern(name[1])})", RULES[rule])


COMM, TREE = (re.compile(pattern(kind)) for kind in ("comm", "tree"))
COMM_LINES = """
mesh x=2x2 stride 8x1
mesh cp=3 ranks 0,3,5 | 1,2,4
ranks 0-55:8/16
async unknown
overlap known
answered 1.0 to train:make.<locals>.Model.forward (item)
backward (no-module) unknown:foo[] x1 of 64 B
outside (no-module) all_to_all[] x1 of 8 B float32
forward a.{0..3} all_gather[dp.post_forward] x2 of float32 activations, x1 of objects ranks 0,2-3
outside (root) recv[pp] x12 of 512 B float32 peer -1
outside (root) broadcast[world] x1 of 64 B int64 async root 0
outside (root) reduce[world] x1 of 64 B int64 root 0 by max in the last of 4 backwards, x1 by avg
outside (root) reduce[world] x1 of 64 B int64 root 0 by max in the last of 4 backwards exposed
optimizer (no-module) host_wait copy_to_host x3 ranks 0,2
total all_to_all[ep] x4 0 B, sum of 4 ranks
total all_to_all[ep] x4 8 B and 3 of unknown size, sum of 4 ranks
total broadcast[world] x1 of unknown size
"""
TREE_LINES = """
ranks 0,3-5
  unit (root) fsdp2 group=2 root shard=dp reshard_after_forward=true param_dtype=bfloat16 offload
  parameter a\\x20b.weight float32[] frozen unmanaged dp=Shard(0) tp=_StridedShard(0,2) tied=c,d
  total 0 units, 4 parameters
"""
WRONG = """
forward a all_gather x1
forward a all_gather[dp] x0
forwards a reshard x1
forward a all_gather[dp] x1 exposed async
forward a host_wait item
total all_gather[dp] x1
unit a fsdp2
"""


def test_every_definition_is_used():
    assert {"comm", "tree"} | {
        name for rule in RULES.values() for name in re.findall(r"<(\w+)>", rule)
    } == set(RULES)


@pytest.mark.parametrize("file", sorted((ROOT / "snapshots").rglob("*.comm")), ids=lambda f: f.name)
def test_the_lines_of_reviewed_snapshots_match(file):
    rule = TREE if file.name.endswith(".tree.comm") else COMM
    lines = file.read_text().splitlines()
    assert [line for line in lines if not rule.fullmatch(line)] == []


@pytest.mark.parametrize(("rule", "lines"), [(COMM, COMM_LINES), (TREE, TREE_LINES)])
def test_odd_lines_match(rule, lines):
    assert [line for line in lines.strip("\n").splitlines() if not rule.fullmatch(line)] == []


def test_grammar_wrong_lines_match_no_rule():
    assert [line for line in WRONG.strip().splitlines() if COMM.fullmatch(line)] == []
