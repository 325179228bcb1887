"""Attributes and fields on docs/recording.md exist, and none is missing."""

import dataclasses
import re
from pathlib import Path

from pytest_fsdp_comm.comm.events import Collective, Recording, Reshard
from pytest_fsdp_comm.recording.comm_mode import CommMode

PAGE = (Path(__file__).parents[2] / "docs" / "recording.md").read_text()


def test_page_lists_attributes_of_comm_mode():
    named = set(re.findall(r"comm_mode\.(\w+)", PAGE))
    assert {name for name in vars(CommMode) if not name.startswith("_")} <= named
    assert all(hasattr(CommMode, name) for name in named)


def test_page_explains_optional_fields():
    optional = {field.name for field in dataclasses.fields(Collective) if field.default is None}
    assert {name for name in optional if f"`{name}`" not in PAGE} == set()
    for kind, prefix in ((Collective, "event"), (Recording, r"comm_mode\.recording")):
        for name in re.findall(rf"\b{prefix}\.(\w+)", PAGE):
            assert hasattr(kind, name), name
    assert {"ahead"} == {
        field.name for field in dataclasses.fields(Reshard) if field.default is None
    }
