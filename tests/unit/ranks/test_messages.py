"""Every message between processes comes back as it was; anything else is refused clearly."""

import contextlib
import dataclasses
import types
import typing
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_fsdp_comm.ranks.wire import messages
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.messages import NextTest
from pytest_fsdp_comm.text.codec import CodecError, dump_tagged

# What pytest itself serializes, and other values that JSON has.
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
SIMPLE = {
    typing.Any: plain,
    float: st.floats(allow_nan=False),
    # With surrogates: what a rank prints need not be UTF-8.
    str: st.text(st.characters()),
    Path: st.builds(Path, st.text(st.characters(exclude_characters="\0/"))),
}


def drawn(annotation):
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        return st.builds(annotation, **{name: drawn(hint) for name, hint in hints.items()})
    if origin in {typing.Union, types.UnionType}:
        return st.one_of(*map(drawn, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(drawn(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(drawn, arguments))
    if origin is dict:
        return st.dictionaries(*map(drawn, arguments), max_size=3)
    return SIMPLE[annotation] if annotation in SIMPLE else st.from_type(annotation)


@pytest.fixture
def channels():
    ours, theirs = Pipe()
    with contextlib.closing(Channel(ours)) as our, contextlib.closing(Channel(theirs)) as their:
        yield our, their


def test_all_dataclasses_of_the_module_are_messages():
    # Or part of one.
    parts = {messages.NextTest}
    own = {
        cls
        for cls in vars(messages).values()
        if isinstance(cls, type) and cls.__module__ == messages.__name__
    }
    assert own - parts <= {*messages.BY_NAME.values()}
    for cls in messages.BY_NAME.values():
        assert cls.__dataclass_params__.frozen, cls
        assert cls.__doc__


@pytest.mark.parametrize("cls", messages.BY_NAME.values(), ids=[*messages.BY_NAME])
@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_message_is_equal_after_a_channel(channels, cls, data):
    ours, theirs = channels
    message = data.draw(drawn(cls))
    # More than the socket holds would block.
    if len(dump_tagged(message)) < 50_000:
        theirs.send(message)
        assert ours.receive() == message


def test_report_with_non_json_value_is_sent(channels):
    ours, theirs = channels

    class Odd:
        def __repr__(self):
            return "<odd>"

    report = {"user_properties": [("thing", Odd()), ("text", "\udcff")], "outcome": "passed"}
    theirs.send(messages.PhaseReport(report=report))
    received = ours.receive()
    assert received.report["user_properties"] == [["thing", "<odd>"], ["text", "\udcff"]]
    assert not received.has_failed


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"no json", "expected a message, but it is not valid JSON: Expecting value"),
        (b"\xff", "expected a message, but it is not valid JSON: 'utf-8' codec"),
        (b"[1]", "message: expected one of PhaseReport, WarningSeen, Debugging,"),
        (b"{}", "message: expected one of PhaseReport, WarningSeen, Debugging,"),
        (b'{"type": "Position", "site": ""}', "Joined, got 'Position'"),
        (b'{"type": "RunTest"}', "RunTest lacks the field 'item_index'"),
        (
            b'{"type": "RunTest", "item_index": "1", "next_test": {}}',
            "RunTest.item_index: expected int, got '1'",
        ),
        (b'{"type": "RunTest", "item_index": 1, "x": 1}', "RunTest has an unknown field 'x'"),
    ],
)
def test_an_invalid_message_is_described_and_skipped(channels, line, complaint):
    ours, theirs = channels
    theirs.connection.send_bytes(line)
    theirs.send(messages.RunTest(item_index=2, next_test=NextTest()))
    with pytest.raises(CodecError) as caught:
        ours.receive()
    assert complaint in str(caught.value)
    assert ours.receive() == messages.RunTest(item_index=2, next_test=NextTest())
