"""The headline, which pytest's summary truncates at its end."""

import pytest
from sample_profiles import kept, profile, renamed, twice, unit

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.diff import Change, Comparison, compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.profile import Row
from pytest_fsdp_comm.reports.changes import render_comparison, render_tree_changes
from pytest_fsdp_comm.reports.explanation import join_failures, write_headline
from pytest_fsdp_comm.tree.diff import TreeChange


def calls(count, nbytes=1024, **what):
    return Calls(count=count, nbytes=nbytes, dtype=what.pop("dtype", "float32"), **what)


def amounts(*held, ranks=()):
    return tuple(row_of(one, ranks=ranks) for one in held if one.count)


def row_of(calls, **changes):
    return Row(phase=Phase.FORWARD, owner="a", what="all_gather", calls=(calls,), **changes)


def change(owner, before, after, what="all_gather[dp]", phase=Phase.FORWARD):
    return Change(
        subject="collective",
        phase=phase,
        owners=(owner,) if owner is None or isinstance(owner, str) else owner,
        what=what,
        before=before,
        after=after,
    )


def counted(owner, before, after, what="all_gather[dp]", phase=Phase.FORWARD):
    return change(owner, amounts(calls(before)), amounts(calls(after)), what, phase)


def reshards(owner, before, after):
    return Change(
        subject="reshard",
        phase=Phase.FORWARD,
        owners=(owner,),
        what="unshard",
        before=(row_of(Calls(count=before)),),
        after=(row_of(Calls(count=after)),),
    )


MESH = Change(subject="frame", phase=None, what="mesh", old_text="dp=2", new_text="dp=4")
PEAK = Change(
    subject="memory", phase=None, what="peak gathered", old_text="512 B", new_text="1_024 B"
)
LAYERS = ("layers.0", "layers.1")
CASES = {
    "the largest first, and how many others": (
        [
            counted("a", 0, 1),
            counted("lm_head", 0, 4),
            counted("lm_head", 0, 4, phase=Phase.BACKWARD),
            counted("lm_head", 0, 1, "reduce_scatter[dp]", Phase.BACKWARD),
            PEAK,
        ],
        "lm_head in forward: all_gather[dp] 0 -> 4 (+4), 0 -> 4.0 KiB per rank, 4 more changes",
    ),
    "an unshard after its all-gather": (
        [reshards("a", 2, 1), counted("a", 2, 1)],
        "a in forward: all_gather[dp] 2 -> 1 (-1), 2.0 -> 1.0 KiB per rank, 1 more change",
    ),
    "an unshard alone": ([reshards("a", 2, 1)], "a in forward: unsharded, 2 -> 1 times (-1)"),
    "of several modules": (
        [counted(LAYERS, 1, 2)],
        "layers.{0..1} in forward, each: all_gather[dp] 1 -> 2 (+1), 1.0 -> 2.0 KiB per rank",
    ),
    "of modules with unlike names": (
        [counted(("a", "b", None), 1, 2)],
        "a, b, (no-module) in forward, each: all_gather[dp] 1 -> 2 (+1), 1.0 -> 2.0 KiB per rank",
    ),
    "an axis where there are several": (
        [counted("a", 1, 5), counted("a", 1, 2, "all_gather[tp]")],
        "a in forward: all_gather[dp] 1 -> 5 (+4), 1.0 -> 5.0 KiB per rank, 1 more change",
    ),
    "bytes": (
        [change("a", amounts(calls(2, 512)), amounts(calls(2, 1024)))],
        "a in forward: all_gather[dp] x2, 1.0 -> 2.0 KiB per rank",
    ),
    "from one phase to another": (
        [counted("a", 1, 0), counted("a", 0, 1, phase=Phase.BACKWARD)],
        "a in forward: all_gather[dp] 1 -> 0 (-1), 1.0 KiB -> 0 B per rank, 1 more change",
    ),
    "an element type": (
        [change("a", amounts(calls(2)), amounts(calls(2, dtype="bfloat16")))],
        "a in forward: all_gather[dp] x2 of 1_024 B float32 -> x2 of 1_024 B bfloat16",
    ),
    "on other ranks": (
        [change(None, amounts(calls(1), ranks=(3,)), amounts(calls(1), ranks=(0,)))],
        "(no-module) in forward: all_gather[dp] on rank 0: 0 -> 1 (+1), 0 -> 1.0 KiB per rank; "
        "on rank 3: 1 -> 0 (-1), 1.0 KiB -> 0 B per rank",
    ),
    "a frame before what follows from it": (
        [counted("a", 1, 9), MESH],
        "mesh: dp=2 -> dp=4, 1 more change",
    ),
    "memory alone": ([PEAK], "peak gathered: 512 B -> 1_024 B"),
    "a tree": (
        [
            TreeChange(subject="lm_head", what="becomes a root"),
            TreeChange(subject="a", what="gone"),
        ],
        "tree: lm_head: becomes a root, 1 more change",
    ),
    "a recording before its tree": (
        [TreeChange(subject="lm_head", what="becomes a root"), counted("a", 1, 2)],
        "a in forward: all_gather[dp] 1 -> 2 (+1), 1.0 -> 2.0 KiB per rank, 1 more change",
    ),
    "what breaks training, of the tree too": (
        [
            counted("a", 1, 2),
            TreeChange(subject="a", what="no longer managed by a unit", breaks_training=True),
        ],
        "breaks training: tree: a: no longer managed by a unit, 1 more change",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), CASES.values(), ids=CASES)
def test_the_headline_is(changes, text):
    """It is the first line of the failure, and says how many changes follow."""
    sent = tuple(change for change in changes if isinstance(change, Change))
    trees = [change for change in changes if not isinstance(change, Change)]
    failures = {
        "tree": render_tree_changes(trees, snapshot="s"),
        "comm": render_comparison(Comparison(changes=sent, remaining=sent), snapshot="s"),
    }
    failure = join_failures(failures, command="", test="")
    assert write_headline(failure) == text
    first = failure.lines[1].strip()
    assert text.startswith(first)


def headline_of(old, new):
    return write_headline(render_comparison(compare(old, new), snapshot="s"))


def test_a_change_of_the_whole_is_its_own_headline():
    old = profile()
    assert headline_of(old, profile(5)) == (
        "layers: 3 -> 5 modules, the new ones like their siblings"
    )
    assert headline_of(old, renamed(twice(old))) == (
        "module layers renamed to blocks, 1 more change"
    )
    assert headline_of(old, kept(old)).startswith("layers.{0..2} no longer resharded")
    assert headline_of(old, profile(extra=[unit("head", 64)])).startswith("head ")
    assert not write_headline(render_comparison(Comparison(changes=()), snapshot="s"))
