"""A whole tree as versioned JSON, for other tools and for the way between processes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Final

from pytest_fsdp_comm.comm.events import MeshAxis
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.tree.layout import AxisPlacement, FlatRange
from pytest_fsdp_comm.tree.model import (
    Finding,
    ModuleNode,
    ParameterNode,
    Precision,
    ShardTree,
    ShardUnit,
)

JSON_VERSION: Final = 1
"""Rises when an older reader would misread the document."""

_KIND: Final = "tree"


def dump_tree(tree: ShardTree) -> str:
    """Writes a tree as JSON; fields as in `ShardTree`, modules and parameters by index."""
    return json.dumps({"kind": _KIND, "version": JSON_VERSION, "value": asdict(tree)})


def load_tree(text: str) -> ShardTree:
    """Reads what `dump_tree` wrote.

    Raises:
        FsdpCommError: The text is no JSON, or of another kind or version, or lacks a field.
    """
    try:
        document = json.loads(text)
    except ValueError as problem:
        raise FsdpCommError(
            f"a sharded tree was expected as JSON, got no JSON: {problem}"
        ) from None
    got = (
        (document.get("kind"), document.get("version")) if isinstance(document, dict) else document
    )
    if got != (_KIND, JSON_VERSION):
        raise FsdpCommError(
            f"a sharded tree of JSON version {JSON_VERSION} was expected, got {str(got)[:80]}; "
            "dump it anew with this version of pytest-fsdp-comm"
        )
    try:
        return _tree(document["value"])
    except (KeyError, TypeError) as problem:
        raise FsdpCommError(
            f"a sharded tree was expected, but its JSON is damaged: {problem!r}; dump it anew"
        ) from problem


def _tree(value: dict[str, Any]) -> ShardTree:
    return ShardTree(
        **{
            **value,
            "mesh_axes": tuple(MeshAxis(**axis) for axis in value["mesh_axes"]),
            "modules": tuple(map(_module, value["modules"])),
            "parameters": tuple(map(_parameter, value["parameters"])),
            "units": tuple(map(_unit, value["units"])),
            "findings": tuple(
                Finding(**{**entry, "fqns": tuple(entry["fqns"])}) for entry in value["findings"]
            ),
            "notes": tuple(value["notes"]),
        }
    )


def _module(value: dict[str, Any]) -> ModuleNode:
    return ModuleNode(**{**value, "wrappers": tuple(value["wrappers"])})


def _parameter(value: dict[str, Any]) -> ParameterNode:
    return ParameterNode(
        **{
            **value,
            "tied": tuple((module, name) for module, name in value["tied"]),
            "shape": tuple(value["shape"]),
            "placements": tuple(AxisPlacement(**entry) for entry in value["placements"]),
            "flat": None if value["flat"] is None else FlatRange(**value["flat"]),
        }
    )


def _unit(value: dict[str, Any]) -> ShardUnit:
    axes = {
        name: None if value[name] is None else MeshAxis(**value[name])
        for name in ("shard_axis", "replicate_axis")
    }
    lists = {
        name: tuple(value[name])
        for name in (
            "modules",
            "parameters",
            "forward_prefetch",
            "backward_prefetch",
            "precision_overrides",
        )
    }
    return ShardUnit(**{**value, **axes, **lists, "precision": Precision(**value["precision"])})
