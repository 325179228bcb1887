"""Frozen dataclasses as JSON and back: messages, recordings, profiles and trees.

Not msgspec, nor cattrs. What they cost counts for sessions without a distributed test: beside
pytest and syrupy, importing msgspec 0.22 takes 6 to 7 ms and cattrs 26.2 about 30 ms, this module
less than one. msgspec also refuses text that is no UTF-8, such as what a rank may print, and a
union of dataclasses, such as the messages of a channel.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import PurePath
from typing import Any, Final, Literal, TypeVar, Union, cast

from pytest_fsdp_comm.errors import FsdpCommError

_Value = TypeVar("_Value")
_Encoder = Callable[[Any], Any]
_Decoder = Callable[[Any, str], Any]

_TAG: Final = "type"
_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_MOST_SHOWN: Final = 60


class CodecError(FsdpCommError):
    """A JSON value is not what its reader expects; the text says where."""


def to_json(value: Any) -> Any:
    """A value as what `json` can write.

    Args:
        value: A dataclass, or what `from_json` can give for one of its fields. An object of any
            other class becomes its ``repr``, and so does a number that JSON has not: what a plugin
            hangs onto a report must not cost the whole report.
    """
    return _encoder(cast("Hashable", type(value)))(value)


def from_json(cls: type[_Value], data: Any, *, where: str = "") -> _Value:
    """A value of a class from what `to_json` made of one.

    Args:
        cls: The class; its fields may hold str, int, float, bool, None, Path, Enum, Literal, Any,
            dataclasses, and tuples, dicts and unions of these.
        data: What `json` read.
        where: What the data is, to begin an error with.

    Raises:
        CodecError: The data is not of the class: says which field, what was expected, what came.
    """
    return cast("_Value", _decoder(cast("Hashable", cls))(data, where or cls.__name__))


def dump_tagged(value: Any) -> str:
    """One of several dataclasses on one line, with the name of its class."""
    return _write({_TAG: type(value).__name__, **to_json(value)})


def load_tagged(classes: Mapping[str, type[_Value]], text: str) -> _Value:
    """Reads what `dump_tagged` wrote.

    Args:
        classes: The classes that it may be, by name.
        text: The line.

    Raises:
        CodecError: It is none of them.
    """
    data = _read(text, "a message")
    name = data.pop(_TAG, None) if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in classes:
        raise _unexpected("message", f"one of {', '.join(classes)}", name)
    return from_json(classes[name], data)


def dump_document(kind: str, version: int, value: Any) -> str:
    """A dataclass as JSON that says what it is, for other programs and later ones."""
    return _write({"kind": kind, "version": version, "value": to_json(value)})


def load_document(cls: type[_Value], kind: str, version: int, text: str) -> _Value:
    """Reads what `dump_document` wrote.

    Raises:
        CodecError: The text is not JSON, of another kind or version, or not of the class.
    """
    data = _read(text, f"a {kind}")
    got = (data.get("kind"), data.get("version")) if isinstance(data, dict) else data
    if got != (kind, version):
        raise CodecError(
            f"expected a {kind} of JSON version {version}, got {_shown(got)}; dump it again with "
            "this version of pytest-fsdp-comm"
        )
    return from_json(cls, data.get("value"), where=kind)


def _write(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _read(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as problem:
        raise CodecError(f"expected {what} as JSON, but it does not parse: {problem}") from None


@cache
def _encoder(cls: type) -> _Encoder:
    if cls in _PLAIN:
        return _finite if cls is float else _same
    if is_dataclass(cls):
        names = tuple(field.name for field in fields(cls))
        return lambda value: {name: to_json(getattr(value, name)) for name in names}
    for bases, encode in _ENCODERS:
        if issubclass(cls, bases):
            return encode
    return repr


def _same(value: Any) -> Any:
    return value


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else str(to_json(key))


_ENCODERS: Final[tuple[tuple[tuple[type, ...], _Encoder], ...]] = (
    ((tuple, list, set, frozenset), lambda value: [to_json(entry) for entry in value]),
    ((Mapping,), lambda value: {_key(key): to_json(entry) for key, entry in value.items()}),
    ((Enum,), lambda value: to_json(value.value)),
    ((PurePath,), str),
    # Subclasses of what JSON has, such as numpy's float64.
    ((int,), int),
    ((float,), lambda value: _finite(float(value))),
    ((str,), str),
)


@cache
def _decoder(annotation: Any) -> _Decoder:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return lambda data, _: data
    if origin is Literal:
        return _one_of(arguments)
    if origin in {Union, types.UnionType}:
        return _union(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin in {dict, Mapping}:
        return _dict(*arguments)
    return _decoder_of_class(annotation)


def _decoder_of_class(cls: Any) -> _Decoder:
    if is_dataclass(cls):
        return _dataclass(cast("type", cls))
    if not isinstance(cls, type):
        raise TypeError(f"{cls!r} has no JSON form")
    if issubclass(cls, Enum):
        return _enum(cls)
    if issubclass(cls, PurePath):
        text = _plain(str, "a path")
        return lambda data, where: cls(text(data, where))
    if cls in _PLAIN:
        return _number if cls is float else _plain(cls, cls.__name__)
    raise TypeError(f"{cls!r} has no JSON form")


def _plain(cls: type, name: str) -> _Decoder:
    def decode(data: Any, where: str) -> Any:
        if type(data) is not cls:
            raise _unexpected(where, name, data)
        return data

    return decode


def _number(data: Any, where: str) -> float:
    if type(data) in {int, float}:
        return float(data)
    if data in {"inf", "-inf", "nan"}:
        return float(data)
    raise _unexpected(where, "float", data)


def _one_of(values: tuple[Any, ...]) -> _Decoder:
    def decode(data: Any, where: str) -> Any:
        for value in values:
            if type(data) is type(value) and data == value:
                return value
        raise _unexpected(where, f"one of {', '.join(map(repr, values))}", data)

    return decode


def _enum(cls: type[Enum]) -> _Decoder:
    def decode(data: Any, where: str) -> Any:
        try:
            return cls(data)
        except ValueError:
            names = ", ".join(repr(member.value) for member in cls)
            raise _unexpected(where, f"one of {names}", data) from None

    return decode


def _union(arguments: tuple[Any, ...]) -> _Decoder:
    """The first of the alternatives that the data fits; None is tried first."""
    others = [_decoder(argument) for argument in arguments if argument is not type(None)]
    is_optional = len(others) < len(arguments)

    def decode(data: Any, where: str) -> Any:
        if data is None and is_optional:
            return None
        for decoder in others[:-1]:
            try:
                return decoder(data, where)
            except CodecError:
                continue
        return others[-1](data, where)

    return decode


def _tuple(arguments: tuple[Any, ...]) -> _Decoder:
    if arguments[-1] is Ellipsis:
        entry = _decoder(arguments[0])

        def decode_all(data: Any, where: str) -> Any:
            values = _list(data, where)
            return tuple(entry(value, f"{where}[{index}]") for index, value in enumerate(values))

        return decode_all
    decoders = [_decoder(argument) for argument in arguments]

    def decode_each(data: Any, where: str) -> Any:
        values = _list(data, where)
        if len(values) != len(decoders):
            raise _unexpected(where, f"{len(decoders)} entries", data)
        return tuple(
            decoder(value, f"{where}[{index}]")
            for index, (decoder, value) in enumerate(zip(decoders, values, strict=True))
        )

    return decode_each


def _list(data: Any, where: str) -> list[Any]:
    if not isinstance(data, list):
        raise _unexpected(where, "a list", data)
    return data


def _dict(key_type: Any, value_type: Any) -> _Decoder:
    key_of, value_of = _decoder(key_type), _decoder(value_type)

    def decode(data: Any, where: str) -> Any:
        if not isinstance(data, dict):
            raise _unexpected(where, "an object", data)
        # JSON knows keys of one type only.
        keys = {key: int(key) if key_type is int and _is_int(key) else key for key in data}
        return {
            key_of(keys[key], where): value_of(value, f"{where}.{key}")
            for key, value in data.items()
        }

    return decode


def _is_int(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _dataclass(cls: type) -> _Decoder:
    annotations = typing.get_type_hints(cls)
    known: dict[str, Field[Any]] = {field.name: field for field in fields(cls)}
    decoders: dict[str, _Decoder] = {}
    needed = {
        name
        for name, field in known.items()
        if field.default is MISSING and field.default_factory is MISSING
    }

    def decode(data: Any, where: str) -> Any:
        if not isinstance(data, dict):
            raise _unexpected(where, f"an object with the fields of {cls.__name__}", data)
        if not decoders:
            # Not before: a class may hold values of its own kind.
            decoders.update({name: _decoder(annotations[name]) for name in known})
        wrong = sorted(data.keys() - known.keys()) or sorted(needed - data.keys())
        if wrong:
            lacks = "lacks" if wrong[0] in needed - data.keys() else "has an unknown"
            raise CodecError(f"{where} {lacks} {wrong[0]!r}")
        return cls(
            **{name: decoders[name](value, f"{where}.{name}") for name, value in data.items()}
        )

    return decode


def _unexpected(where: str, expected: str, got: Any) -> CodecError:
    return CodecError(f"{where}: expected {expected}, got {_shown(got)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"
