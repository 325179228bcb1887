"""Convert frozen dataclasses to JSON and back: messages, recordings, profiles and trees."""

from __future__ import annotations

import builtins
import collections.abc
import json
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import PurePath
from typing import Any, Final, TypeVar, cast

from pytest_fsdp_comm.errors import FsdpCommError

# This module uses no library because it must import fast: every pytest session imports it, even one
# without distributed tests. Importing it takes less than 1 ms; msgspec 0.22 takes 6 to 7 ms, cattrs
# 26.2 about 30 ms. msgspec also rejects text that is not UTF-8, which a rank may print, and unions
# of dataclasses, such as the messages between pytest and a rank.

_Value = TypeVar("_Value")
_Reader = Callable[[Any, str], Any]

_TAG: Final = "type"
_PLAIN: Final = frozenset({str, int, bool, types.NoneType})
_MAX_QUOTED: Final = 60


class CodecError(FsdpCommError):
    """Raised if a JSON value does not fit its class; the message names the field."""


def to_json(value: object) -> Any:  # noqa: PLR0911  # one return per type
    """Convert a value to types that `json` can write."""
    # Use the repr for objects of other types, and for numbers that JSON cannot represent. Never
    # raise an error, because other plugins may add attributes of any type to a report.
    cls = type(value)
    if cls in _PLAIN:
        return value
    if (names := _field_names(cast("Hashable", cls))) is not None:
        return {name: to_json(getattr(value, name)) for name in names}
    match value:
        case Enum():
            return to_json(value.value)
        case tuple() | list() | set() | frozenset():
            return [to_json(entry) for entry in value]
        case Mapping():
            return {
                key if isinstance(key, str) else str(to_json(key)): to_json(entry)
                for key, entry in value.items()
            }
        # The remaining cases convert subclasses of JSON types, such as numpy's float64.
        case str() | PurePath():
            return str(value)
        case int():
            return int(value)
        case float() if math.isfinite(value):
            return float(value)
        case float():
            return repr(float(value))
    return repr(value)


def from_json(cls: type[_Value], data: object, *, where: str = "") -> _Value:
    """Convert the output of `to_json` back to an instance of `cls`, or raise CodecError.

    Fields may be str, int, float, bool, None, Path, Enum, Literal, Any, dataclasses, and tuples,
    dicts and unions of these. Errors start with `where`, by default the name of the class.
    """
    return cast("_Value", _make_reader(cast("Hashable", cls))(data, where or cls.__name__))


def dump_tagged(value: object) -> str:
    """Return a dataclass instance as one line of JSON that includes the name of its class."""
    return _write_json({_TAG: type(value).__name__, **to_json(value)})


def load_tagged(classes: Mapping[str, type[_Value]], text: str | bytes) -> _Value:
    """Convert the output of `dump_tagged` back to an instance of its class, or raise CodecError."""
    data = _parse_json(text, "a message")
    name = data.pop(_TAG, None) if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in classes:
        raise _make_error("message", f"one of {', '.join(classes)}", name)
    return from_json(classes[name], data)


def dump_document(kind: str, version: int, value: object) -> str:
    """Return a dataclass instance as a JSON document with its kind and format version."""
    return _write_json({"kind": kind, "version": version, "value": to_json(value)})


def load_document(cls: type[_Value], kind: str, version: int, text: str) -> _Value:
    """Read the output of `dump_document`; raise CodecError if its kind or version differs."""
    data = _parse_json(text, f"a {kind}")
    got = (data.get("kind"), data.get("version")) if isinstance(data, dict) else data
    if got != (kind, version):
        raise CodecError(
            f"expected a {kind} of JSON version {version}, got {_quote_shortened(got)}; save it "
            "again with this version of pytest-fsdp-comm"
        )
    return from_json(cls, data.get("value"), where=kind)


def _write_json(data: object) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _parse_json(text: str | bytes, subject: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as problem:
        raise CodecError(f"expected {subject}, but it is not valid JSON: {problem}") from None


@cache
def _field_names(cls: Hashable) -> tuple[str, ...] | None:
    return tuple(entry.name for entry in fields(cls)) if is_dataclass(cls) else None


# Cache the reader of each annotation: ranks send many messages, and resolving the annotations of a
# dataclass takes longer than reading an instance.


@cache
def _make_reader(kind: object) -> _Reader:  # noqa: PLR0911  # one return per type
    """Return a function of (data, where) that reads JSON as `kind`; its errors name `where`."""
    arguments = typing.get_args(kind)
    match typing.get_origin(kind) or kind:
        case typing.Any:
            return lambda data, _: data
        case typing.Literal:
            return partial(_read_choice, {value: value for value in arguments})
        case typing.Union | types.UnionType:
            readers = [_make_reader(member) for member in arguments if member is not types.NoneType]
            return partial(_read_union, readers, len(readers) < len(arguments))
        case builtins.tuple:
            readers = [_make_reader(entry) for entry in arguments if entry is not Ellipsis]
            return partial(_read_tuple, readers, Ellipsis in arguments)
        case builtins.dict | collections.abc.Mapping:
            # JSON keys are always strings, so keys that were integers must be parsed.
            read_key = _read_whole_number if arguments[0] is int else _make_reader(arguments[0])
            return partial(_read_mapping, read_key, _make_reader(arguments[1]))
        case type() as cls if is_dataclass(cls):
            return partial(_read_dataclass, cls)
        case type() as cls if issubclass(cls, Enum):
            return partial(_read_choice, {member.value: member for member in cls})
        case type() as cls if cls in _PLAIN or issubclass(cls, (float, PurePath)):
            return partial(_read_plain, cls)
        case _:
            raise TypeError(f"{kind!r} has no JSON form")


def _read_plain(cls: Any, data: object, where: str) -> object:
    if type(data) is cls:
        return data
    if cls is float and (type(data) is int or data in ("inf", "-inf", "nan")):
        return float(data)
    if issubclass(cls, PurePath) and type(data) is str:
        return cls(data)
    raise _make_error(where, "a path" if issubclass(cls, PurePath) else cls.__name__, data)


def _read_whole_number(key: str, where: str) -> int:
    is_number = key.removeprefix("-").isdecimal()
    return cast("int", _read_plain(int, int(key) if is_number else key, where))


def _read_choice(choices: Mapping[object, object], data: object, where: str) -> object:
    for value, chosen in choices.items():
        # Compare types too, because 1 equals True.
        if type(data) is type(value) and data == value:
            return chosen
    raise _make_error(where, f"one of {', '.join(map(repr, choices))}", data)


def _read_union(readers: list[_Reader], is_optional: bool, data: object, where: str) -> object:
    """Return None if the data is null and the union allows it, else try the members in order."""
    if data is None and is_optional:
        return None
    for read in readers[:-1]:
        with suppress(CodecError):
            return read(data, where)
    return readers[-1](data, where)


def _read_tuple(readers: list[_Reader], is_any_length: bool, data: object, where: str) -> object:
    if not isinstance(data, list):
        raise _make_error(where, "a list", data)
    if is_any_length:
        readers = readers * len(data)
    if len(data) != len(readers):
        raise _make_error(where, f"{len(readers)} entries", data)
    pairs = enumerate(zip(readers, data, strict=True))
    return tuple(read(value, f"{where}[{index}]") for index, (read, value) in pairs)


def _read_mapping(read_key: _Reader, read_value: _Reader, data: object, where: str) -> object:
    if not isinstance(data, dict):
        raise _make_error(where, "an object", data)
    return {
        read_key(key, where): read_value(value, f"{where}.{key}") for key, value in data.items()
    }


@cache
def _make_field_readers(cls: Any) -> tuple[dict[str, _Reader], set[str]]:
    kinds = typing.get_type_hints(cls)
    needed = {
        entry.name
        for entry in fields(cls)
        if entry.default is MISSING and entry.default_factory is MISSING
    }
    return {entry.name: _make_reader(kinds[entry.name]) for entry in fields(cls)}, needed


def _read_dataclass(cls: type, data: object, where: str) -> object:
    if not isinstance(data, dict):
        raise _make_error(where, f"an object with the fields of {cls.__name__}", data)
    readers, needed = _make_field_readers(cls)
    if unknown := sorted(data.keys() - readers.keys()):
        raise CodecError(f"{where} has an unknown field {unknown[0]!r}")
    if missing := sorted(needed - data.keys()):
        raise CodecError(f"{where} lacks the field {missing[0]!r}")
    return cls(**{name: readers[name](value, f"{where}.{name}") for name, value in data.items()})


def _make_error(where: str, expected: str, got: object) -> CodecError:
    return CodecError(f"{where}: expected {expected}, got {_quote_shortened(got)}")


def _quote_shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 1]}…"
