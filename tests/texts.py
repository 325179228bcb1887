"""Parse and write the texts of snapshots."""

from pytest_fsdp_comm.snapshots import tree_text
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.tree.profile import fold


def parse_comm(text, where="snapshot"):
    """Parse the snapshot of a recording."""
    return _parsed(text, where, "comm")


def parse_trees(text, where="snapshot"):
    """Parse the snapshot of trees."""
    return _parsed(text, where, "tree")


def parse_tree(text, where="snapshot"):
    """Parse the snapshot of a tree that all ranks share."""
    return parse_trees(text, where).common


def format_tree(tree):
    """Write the snapshot of one rank's tree."""
    return tree_text.format_profile(fold(tree))


def _parsed(text, where, kind):
    snapshot = SnapshotText(text, where=where)
    if snapshot.lines.kind != kind:
        raise snapshot.lines.error(1, f"it is of kind {snapshot.lines.kind!r}", f"kind {kind!r}")
    return snapshot.profile
