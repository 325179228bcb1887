"""The value of the fixture ``fsdp_tree``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pytest_fsdp_comm.errors import FsdpCommError, printable
from pytest_fsdp_comm.gathering import gather_alike
from pytest_fsdp_comm.reports.trees import render_tree
from pytest_fsdp_comm.sharding.capture import WrapExpectation, capture_tree, expect_units
from pytest_fsdp_comm.snapshots.documents import write_atomically
from pytest_fsdp_comm.snapshots.tree_text import format_profile
from pytest_fsdp_comm.tree.finding import FindingSettings
from pytest_fsdp_comm.tree.findings.rules import find_between_ranks
from pytest_fsdp_comm.tree.model import ShardTree, dump_tree
from pytest_fsdp_comm.tree.profile import TreeProfile, ranks_of_stages, tree_facts

if TYPE_CHECKING:
    from torch import nn  # noqa: TID251  # for the type only


class TreeFactory:
    """Makes the sharded tree of a model."""

    def __init__(
        self,
        *,
        findings: FindingSettings | None = None,
        gather: Callable[[str], list[str]] = lambda text: [text],
        ranks: Sequence[int] = (),
    ) -> None:
        """Keep how trees are judged, and how `ranks` (empty if from 0) exchange them."""
        self._findings = findings or FindingSettings()
        self._gather = gather
        self._ranks = ranks

    def __repr__(self) -> str:
        """Short, since pytest shows it beside every failure of a test that has the fixture."""
        return "<TreeFactory>"

    def __call__(self, model: nn.Module | Sequence[nn.Module]) -> ShardTree:
        """How the model is sharded now. Neither runs the model nor sends anything.

        Args:
            model: Any module; usually the FSDP root. A list for the parts of one model that this
                rank runs, such as the stages of a pipeline: each part is a root of the tree, and
                each module is named as its part names it.

        Raises:
            RecordingError: It is not a module, is half built, or two parts have a parameter of the
                same name.
        """
        return capture_tree(model, self._findings)

    def of_all_ranks(self, model: nn.Module | Sequence[nn.Module]) -> ShardTree:
        """As a plain call, with a finding if the ranks' trees differ. Every rank must call it.

        Ranks that have no parameter name in common run different stages, and are not compared.
        """
        tree = self(model)
        trees = gather_alike(self._gather, "fsdp_tree.of_all_ranks", tree_facts(tree))
        by_rank = dict(zip(self._ranks or range(len(trees)), trees, strict=True))
        # Ranks with the same tree share it.
        written = {
            key: format_profile(TreeProfile(trees={(): facts}))
            for key, facts in {id(facts): facts for facts in trees}.items()
        }
        texts = {rank: written[id(facts)] for rank, facts in by_rank.items()}
        found = [
            finding
            for ranks in ranks_of_stages(by_rank)
            for finding in find_between_ranks({rank: texts[rank] for rank in ranks}, self._findings)
        ]
        return replace(tree, findings=(*found, *tree.findings))

    def expect(self, model: nn.Module | Sequence[nn.Module], policy: Any) -> WrapExpectation:
        """Compare the model's units with those that an auto-wrap policy would make.

        Args:
            model: The model, wrapped or not, or a list as for a plain call.
            policy: As FSDP1's ``auto_wrap_policy``, or a set of module classes.

        Raises:
            RecordingError: `model` is not a module, or `policy` is not a policy.
        """
        return expect_units(model, policy)

    def show(self, tree: ShardTree, file: TextIO | None = None) -> None:
        """Print a tree in columns."""
        __tracebackhide__ = True  # the error is the caller's
        _check_tree(tree, "fsdp_tree.show", "fsdp_tree.show(fsdp_tree(model))")
        (file or sys.stdout).write(render_tree(tree) + "\n")

    def save(self, tree: ShardTree, path: str | os.PathLike[str]) -> None:
        """Write a tree to a file: as a page to look at, or as JSON for other tools.

        The ending of the path decides: ``.html`` or ``.json``.
        """
        __tracebackhide__ = True
        _check_tree(tree, "fsdp_tree.save", "fsdp_tree.save(fsdp_tree(model), path)")
        match Path(path).suffix:
            case ".json":
                text = dump_tree(tree)
            case ".html":
                from pytest_fsdp_comm.reports.html.pages import tree_page  # noqa: PLC0415  # few tests need it

                text = tree_page(tree)
            case _:
                raise FsdpCommError(
                    f"fsdp_tree.save writes .html and .json files, got {os.fspath(path)!r}; use "
                    "one of these extensions"
                )
        # Where every rank writes the same file, each replaces it as a whole.
        write_atomically(Path(path), text)


def _check_tree(given: object, called: str, usage: str) -> None:
    __tracebackhide__ = True
    if not isinstance(given, ShardTree):
        raise FsdpCommError(
            f"{called} expects a tree, as fsdp_tree(model) returns it, got "
            f"{printable(type(given).__name__)}; write {usage}"
        )
