"""Values round-trip through JSON; errors say where a value is wrong."""

import json
import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_fsdp_comm.text.codec import (
    CodecError,
    dump_document,
    dump_tagged,
    from_json,
    load_document,
    load_tagged,
    to_json,
)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    colour: Colour
    seconds: float
    path: Path
    kind: Literal["a", "b"]
    parts: tuple[Part, ...] = ()
    pair: tuple[int, str] = (0, "")
    by_rank: dict[int, Part] = field(default_factory=dict)
    either: Part | tuple[str, ...] | None = None
    anything: Any = None
    is_old: bool = False


parts = st.builds(Part, name=st.text(), size=st.none() | st.integers())
wholes = st.builds(
    Whole,
    colour=st.sampled_from(Colour),
    seconds=st.floats(allow_nan=False),
    path=st.builds(Path, st.text(st.characters(exclude_characters="\0/"), min_size=1)),
    kind=st.sampled_from(["a", "b"]),
    parts=st.lists(parts).map(tuple),
    pair=st.tuples(st.integers(), st.text()),
    by_rank=st.dictionaries(st.integers(), parts),
    either=st.none() | parts | st.lists(st.text()).map(tuple),
    anything=st.none() | st.lists(st.integers()) | st.dictionaries(st.text(), st.booleans()),
    is_old=st.booleans(),
)


@given(wholes)
def test_values_round_trip(whole):
    assert load_document(Whole, "whole", 1, dump_document("whole", 1, whole)) == whole
    assert load_tagged({"Part": Part, "Whole": Whole}, dump_tagged(whole)) == whole


def test_surrogates_and_infinity_round_trip():
    part = Part(name="\udcff\ud800", size=2**70)
    assert from_json(Part, json.loads(json.dumps(to_json(part)))) == part
    assert to_json(math.inf) == "inf"
    assert from_json(tuple[float, ...], ["inf", 1]) == (math.inf, 1.0)


def test_other_objects_become_their_repr():
    class Odd:
        def __repr__(self):
            return "<odd>"

    assert to_json({"a": Odd(), 3: (1, {2})}) == {"a": "<odd>", "3": [1, [2]]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"colour": "green"}, "whole.colour: expected one of 'red', 'blue', got 'green'"),
        ({"seconds": "1"}, "whole.seconds: expected float, got '1'"),
        ({"kind": "c"}, "whole.kind: expected one of 'a', 'b', got 'c'"),
        ({"parts": [{"name": 1, "size": None}]}, "whole.parts[0].name: expected str, got 1"),
        ({"parts": [{"name": ""}]}, "whole.parts[0] lacks the field 'size'"),
        ({"parts": [3]}, "whole.parts[0]: expected an object with the fields of Part, got 3"),
        ({"parts": {}}, "whole.parts: expected a list, got {}"),
        ({"pair": [1]}, "whole.pair: expected 2 entries, got [1]"),
        ({"by_rank": {"x": {"name": "", "size": 1}}}, "whole.by_rank: expected int, got 'x'"),
        ({"is_old": 1}, "whole.is_old: expected bool, got 1"),
        ({"colour": []}, "whole.colour: expected one of 'red', 'blue', got []"),
        ({"more": 1}, "whole has an unknown field 'more'"),
        ({"path": 1}, "whole.path: expected a path, got 1"),
    ],
)
def test_wrong_field_error_names_field_and_value(change, complaint):
    whole = to_json(Whole(colour=Colour.RED, seconds=1.0, path=Path("p"), kind="a"))
    text = json.dumps({"kind": "whole", "version": 1, "value": {**whole, **change}})
    with pytest.raises(CodecError) as caught:
        load_document(Whole, "whole", 1, text)
    assert str(caught.value) == complaint


@pytest.mark.parametrize("text", ["", "[", "3", "null", "{}", '{"kind": "whole", "version": 2}'])
def test_load_document_rejects_other_documents(text):
    with pytest.raises(CodecError, match="expected a whole"):
        load_document(Whole, "whole", 1, text)


@pytest.mark.parametrize("text", ['{"type": "Other"}', "{}", "[]", '{"type": ["Part"]}'])
def test_load_tagged_rejects_other_messages(text):
    with pytest.raises(CodecError, match="message: expected one of Part, Whole, got"):
        load_tagged({"Part": Part, "Whole": Whole}, text)
