"""Fully qualified names as text: escaped, in natural order, numbered siblings folded into one.

A *pattern* is the text of one or more FQNs: ``layers.{0..3,7}.mlp.weight`` stands for five names.
`fold_fqns` writes patterns and `expand` reads them; one undoes the other, whatever the names hold.
`matcher` asks whether a name is one of them.
"""

from __future__ import annotations

import math
import re
from itertools import groupby, product
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ROOT_TEXT: Final = "(root)"
"""How the root's FQN, which is empty, is written. Parentheses in names are escaped."""

NO_MODULE: Final = "(no-module)"
"""How is written that there is no module."""

MAX_EXPANDED: Final = 10_000_000
"""The most FQNs that one pattern may stand for: far above any model, below what exhausts memory."""

_RESERVED: Final = frozenset("\\{}(),#")
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))|\\")
_DIGITS: Final = re.compile(r"([0-9]+)")
# `+` joins the modules of one FSDP unit in `events`, so a number may stand beside it too.
_SEPARATOR: Final = re.compile(r"([.+])")
# At most nine digits: such a number is exact everywhere, and no model has more siblings.
_FOLDABLE: Final = re.compile(r"0|[1-9][0-9]{0,8}")
_NUMBERS: Final = re.compile(r"\{([^{}]*)\}")
_ANY: Final = r"[^.+]+"
_RANGE: Final = re.compile(r"(0|[1-9][0-9]{0,8})(?:\.\.(0|[1-9][0-9]{0,8}))?")

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.+-]+")

_NaturalPart: TypeAlias = tuple[bool, int, str]
_Box: TypeAlias = tuple[tuple[int, ...], ...]
"""The numbers that each numbered place of an FQN takes, ascending."""


def natural_key(fqn: str) -> tuple[tuple[tuple[_NaturalPart, ...], ...], str]:
    """Sorts FQNs as people count: parents before children, ``layers.2`` before ``layers.10``."""
    segments = tuple(
        tuple(_natural_part(part) for part in _DIGITS.split(segment) if part)
        for segment in fqn.split(".")
        if fqn
    )
    return segments, fqn


def _natural_part(part: str) -> _NaturalPart:
    if not _DIGITS.fullmatch(part):
        return (True, 0, part)
    # Compared by length and then as text: int() refuses more than 4300 digits.
    significant = part.lstrip("0")
    return (False, len(significant), significant)


def escape(fqn: str) -> str:
    r"""Writes one FQN without whitespace, braces, parentheses, commas, ``#`` or backslashes.

    Returns:
        The FQN with each such character, and each that is not printable, as ``\xHH``, ``\uHHHH`` or
        ``\UHHHHHHHH``; `ROOT_TEXT` for the root.
    """
    if not fqn:
        return ROOT_TEXT
    if _PLAIN.fullmatch(fqn):
        return fqn
    return "".join(map(_escape_character, fqn))


def _escape_character(character: str) -> str:
    if character.isprintable() and character != " " and character not in _RESERVED:
        return character
    code = ord(character)
    if code <= 0xFF:  # noqa: PLR2004  # two hexadecimal digits reach this far
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004  # four digits


def unescape(text: str) -> str:
    """Reads what `escape` wrote.

    Raises:
        ValueError: A backslash does not start an escape that `escape` writes.
    """
    return "" if text == ROOT_TEXT else _ESCAPE.sub(lambda match: _unescape(match, text), text)


def _unescape(match: re.Match[str], text: str) -> str:
    digits = match[1] or match[2] or match[3]
    if digits is None or int(digits, 16) > 0x10FFFF:  # noqa: PLR2004  # the last code point
        raise ValueError(
            f"bad escape at column {match.start() + 1} of {text!r}: expected \\xHH, \\uHHHH or "
            "\\UHHHHHHHH with lower-case hexadecimal digits"
        )
    return chr(int(digits, 16))


def fold_fqns(fqns: Iterable[str]) -> tuple[str, ...]:
    """Writes a set of FQNs as few patterns, folding numbers that form a full product.

    Innermost numbers are folded first, so that the odd block stands out whole: eight experts in
    layers 0 to 2 and four in layer 3 become ``layers.{0..2}.experts.{0..7}`` and
    ``layers.3.experts.{0..3}``.

    Args:
        fqns: In any order; duplicates count once.

    Returns:
        Patterns in natural order of the first FQN of each. Every FQN is in exactly one.
    """
    by_words: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for fqn in dict.fromkeys(fqns):
        words, numbers = _split_numbers(fqn)
        by_words.setdefault(words, []).append(numbers)
    folded = [
        (natural_key(_join(words, [str(values[0]) for values in box])), words, box)
        for words, points in by_words.items()
        for box in _fold_points(points)
    ]
    return tuple(
        escape(_join(words, ())) if not box else _pattern(words, box)
        for _, words, box in sorted(folded, key=lambda entry: entry[0])
    )


def _split_numbers(fqn: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Splits an FQN into its numbers and the text before, between and after them."""
    words = [""]
    numbers = []
    for token in _SEPARATOR.split(fqn):
        if _FOLDABLE.fullmatch(token):
            numbers.append(int(token))
            words.append("")
        else:
            words[-1] += token
    return tuple(words), tuple(numbers)


def _fold_points(points: Sequence[tuple[int, ...]]) -> list[_Box]:
    """Partitions points into boxes."""
    boxes: list[_Box] = [tuple((number,) for number in point) for point in points]
    for axis in reversed(range(len(points[0]))):
        merged: dict[_Box, list[int]] = {}
        for box in boxes:
            merged.setdefault(box[:axis] + box[axis + 1 :], []).extend(box[axis])
        boxes = [
            (*others[:axis], tuple(sorted(values)), *others[axis:])
            for others, values in merged.items()
        ]
    return boxes


def _join(words: Sequence[str], numbers: Sequence[str]) -> str:
    return words[0] + "".join(
        number + word for number, word in zip(numbers, words[1:], strict=True)
    )


def _pattern(words: Sequence[str], box: _Box) -> str:
    escaped = ["".join(map(_escape_character, word)) for word in words]
    return _join(escaped, [_write_numbers(values) for values in box])


def _write_numbers(values: tuple[int, ...]) -> str:
    if len(values) == 1:
        return str(values[0])
    # Neighbouring numbers keep the same distance to their place in the list.
    runs = [
        [value for _, value in run]
        for _, run in groupby(enumerate(values), key=lambda pair: pair[1] - pair[0])
    ]
    written = (str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
    return "{" + ",".join(written) + "}"


def expand(pattern: str) -> tuple[str, ...]:
    """Lists the FQNs that a pattern stands for, the last number running fastest.

    Raises:
        ValueError: The text is no pattern that `fold_fqns` writes; it says where and what was
            expected.
    """
    written, ranges = _split_pattern(pattern)
    count = math.prod(sum(last - first + 1 for first, last in axis) for axis in ranges)
    if count > MAX_EXPANDED:
        raise ValueError(f"{pattern!r} stands for {count} names; at most {MAX_EXPANDED} can be")
    words = [unescape(part) for part in written]
    axes = ([str(n) for a, b in axis for n in range(a, b + 1)] for axis in ranges)
    return tuple(_join(words, numbers) for numbers in product(*axes))


def matcher(pattern: str) -> Callable[[str], bool]:
    """Reads a pattern as a question, in which ``*`` stands for one segment or a part of one.

    The FQNs are not listed, so that large numbers cost nothing.

    Returns:
        Tells of an FQN whether the pattern stands for it.

    Raises:
        ValueError: As `expand`.
    """
    if pattern == ROOT_TEXT:
        return lambda fqn: not fqn
    written, ranges = _split_pattern(pattern)
    words = (_ANY.join(re.escape(unescape(word)) for word in part.split("*")) for part in written)
    shape = re.compile(f"({_FOLDABLE.pattern})".join(words), re.DOTALL)

    def matches(fqn: str) -> bool:
        found = shape.fullmatch(fqn)
        return found is not None and all(
            any(first <= int(number) <= last for first, last in axis)
            for number, axis in zip(found.groups(), ranges, strict=True)
        )

    return matches


def _split_pattern(pattern: str) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """The text before, between and after the braces, still escaped, and what is in them."""
    parts = _NUMBERS.split(pattern)
    for brace in "{}":
        if any(brace in part for part in parts[::2]):
            raise ValueError(f"unpaired {brace!r} in {pattern!r}: expected e.g. layers.{{0..3}}")
    return parts[::2], [_read_ranges(part, pattern) for part in parts[1::2]]


def _read_ranges(text: str, pattern: str) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if last < first or (ranges and first <= ranges[-1][1]):
            raise ValueError(
                f"bad numbers {{{text}}} in {pattern!r}: expected ascending numbers and ranges "
                "such as {0..3,7}"
            )
        ranges.append((first, last))
    return ranges
