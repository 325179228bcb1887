"""Sharded trees as versioned JSON, for other tools; fields as in `model.ShardTree`."""

from __future__ import annotations

from typing import Final

from pytest_fsdp_comm.text.codec import dump_document, load_document
from pytest_fsdp_comm.tree.model import ShardTree

JSON_VERSION: Final = 1
"""Rises when an older reader would misread the document."""

_KIND: Final = "tree"


def dump_tree(tree: ShardTree) -> str:
    """Write a tree as JSON; its modules, parameters and units refer to each other by index."""
    return dump_document(_KIND, JSON_VERSION, tree)


def load_tree(text: str) -> ShardTree:
    """Read what `dump_tree` wrote.

    Raises:
        CodecError: The text is not JSON, of another kind or version, or says where it is no tree.
    """
    return load_document(ShardTree, _KIND, JSON_VERSION, text)
