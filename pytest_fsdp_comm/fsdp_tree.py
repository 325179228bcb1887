"""The fixture ``fsdp_tree``: capture, print and save how a model is sharded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pytest_fsdp_comm.errors import FsdpCommError, printable
from pytest_fsdp_comm.gathering import gather_values
from pytest_fsdp_comm.reports.trees import render_tree
from pytest_fsdp_comm.sharding.capture import WrapExpectation, capture_tree, expect_units
from pytest_fsdp_comm.snapshots.tree_text import format_profile
from pytest_fsdp_comm.text.files import write_atomically
from pytest_fsdp_comm.tree.finding import FindingSettings
from pytest_fsdp_comm.tree.findings.rules import find_between_ranks
from pytest_fsdp_comm.tree.model import ShardTree, dump_tree
from pytest_fsdp_comm.tree.profile import TreeProfile, ranks_of_stages, tree_facts

if TYPE_CHECKING:
    from torch import nn  # noqa: TID251  # for the type only


class TreeFactory:
    """Value of the fixture ``fsdp_tree``: captures how a model is sharded."""

    def __init__(
        self,
        *,
        findings: FindingSettings | None = None,
        gather: Callable[[str], list[str]] = lambda text: [text],
        ranks: Sequence[int] = (),
    ) -> None:
        """Create a factory; `gather` exchanges strings between `ranks` (all ranks if empty)."""
        self._findings = findings or FindingSettings()
        self._gather = gather
        self._ranks = ranks

    def __repr__(self) -> str:
        """Return a short repr, because pytest prints it when a test with this fixture fails."""
        return "<TreeFactory>"

    def __call__(self, model: nn.Module | Sequence[nn.Module]) -> ShardTree:
        """Return how the model is currently sharded, without running it or communicating.

        Args:
            model: Any module, usually the FSDP root. For a pipeline, a list of this rank's stages:
                each becomes a root of the tree. Module names are relative to their stage.

        Raises:
            RecordingError: `model` is not a module or is only partly built, or two stages have a
                parameter with the same name.
        """
        return capture_tree(model, self._findings)

    def of_all_ranks(self, model: nn.Module | Sequence[nn.Module]) -> ShardTree:
        """Return the tree, with a finding if the ranks' trees differ; every rank must call this.

        Ranks that share no parameter name run different pipeline stages, so their trees may differ.
        """
        tree = self(model)
        trees = gather_values(self._gather, "fsdp_tree.of_all_ranks", tree_facts(tree))
        by_rank = dict(zip(self._ranks or range(len(trees)), trees, strict=True))
        # `gather_values` returns one object for equal trees, so format each object only once.
        written = {
            key: format_profile(TreeProfile(trees={(): facts}))
            for key, facts in {id(facts): facts for facts in trees}.items()
        }
        texts = {rank: written[id(facts)] for rank, facts in by_rank.items()}
        differences = [
            finding
            for ranks in ranks_of_stages(by_rank)
            for finding in find_between_ranks({rank: texts[rank] for rank in ranks}, self._findings)
        ]
        return replace(tree, findings=(*differences, *tree.findings))

    def expect(self, model: nn.Module | Sequence[nn.Module], policy: Any) -> WrapExpectation:
        """Compare the model's FSDP units with those that an auto-wrap policy would create.

        Args:
            model: The model, wrapped or not, or a list of stages.
            policy: An ``auto_wrap_policy`` of FSDP1, or a set of module classes.

        Raises:
            RecordingError: `model` is not a module, or `policy` is not a policy.
        """
        return expect_units(model, policy)

    def show(self, tree: ShardTree, file: TextIO | None = None) -> None:
        """Print a tree in columns, by default to standard output."""
        __tracebackhide__ = True  # show the caller's line
        _check_is_tree(tree, "fsdp_tree.show", "fsdp_tree.show(fsdp_tree(model))")
        (file or sys.stdout).write(render_tree(tree) + "\n")

    def save(self, tree: ShardTree, path: str | os.PathLike[str]) -> None:
        """Write a tree to a file: a page (``.html``), or data for other tools (``.json``)."""
        __tracebackhide__ = True
        _check_is_tree(tree, "fsdp_tree.save", "fsdp_tree.save(fsdp_tree(model), path)")
        match Path(path).suffix:
            case ".json":
                text = dump_tree(tree)
            case ".html":
                from pytest_fsdp_comm.reports.html.pages import render_tree_page  # noqa: PLC0415  # few tests need it

                text = render_tree_page(tree)
            case _:
                raise FsdpCommError(
                    f"fsdp_tree.save writes .html and .json files, got {os.fspath(path)!r}; use "
                    "one of these extensions"
                )
        # All ranks may write this file at the same time, so replace it atomically.
        write_atomically(Path(path), text)


def _check_is_tree(tree: object, function: str, usage: str) -> None:
    __tracebackhide__ = True
    if not isinstance(tree, ShardTree):
        raise FsdpCommError(
            f"{function} expects a tree returned by fsdp_tree(model), got "
            f"{printable(type(tree).__name__)}; write {usage}"
        )
