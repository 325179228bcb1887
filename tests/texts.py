"""Snapshots of either kind, from texts and as texts."""

from pytest_fsdp_comm.snapshots import tree_text
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.tree.profile import fold


def parse_comm(text, where="snapshot"):
    """The profile of a recording's snapshot."""
    return _parsed(text, where, "comm")


def parse_trees(text, where="snapshot"):
    """The profile of the snapshot of sharded trees."""
    return _parsed(text, where, "tree")


def parse_tree(text, where="snapshot"):
    """The tree that all ranks have."""
    return parse_trees(text, where).common


def format_tree(tree):
    """The snapshot of one rank's tree."""
    return tree_text.format_profile(fold(tree))


def _parsed(text, where, kind):
    snapshot = SnapshotText(text, where=where)
    if snapshot.lines.kind != kind:
        raise snapshot.lines.error(1, f"it is of kind {snapshot.lines.kind!r}", f"kind {kind!r}")
    return snapshot.profile
