"""Fully qualified names as text: escaped, in natural order, numbered siblings folded into one.

A *pattern* is the text of one or more FQNs: ``layers.{0..3,7}.mlp.weight`` stands for five names.
`fold_fqns` writes patterns and `expand` reads them; one undoes the other, whatever the names hold.
`matcher` asks whether a name is one of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Final, TypeAlias

from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.text.rank_lists import runs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

ROOT_TEXT: Final = "(root)"
"""How the root's FQN, which is empty, is written. Parentheses in names are escaped."""

NO_MODULE: Final = "(no-module)"
"""What is written where there is no module."""

MAX_NAMES: Final = 131_072
"""The most FQNs that a pattern, or a whole snapshot, may stand for: those of 60 layers of 256
experts with 8 lines each. A reader lists them, 15 microseconds each."""

_RESERVED: Final = frozenset("\\{}(),#")
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))|\\")
_DIGITS: Final = re.compile(r"([0-9]+)")
# `+` joins the modules of one FSDP unit in `events`, so a number may stand beside it too.
_SEPARATOR: Final = re.compile(r"([.+])")
_SEPARATORS: Final = (".", "+")
# At most nine digits: such a number is exact everywhere, and no model has more siblings.
_FOLDABLE: Final = re.compile(r"0|[1-9][0-9]{0,8}")
_NUMBERS: Final = re.compile(r"\{([0-9]+)[^{}]*\}")
# Within braces a dot separates nothing.
_TOKEN: Final = re.compile(r"\{[^{}]*\}|[.+]|[^.+{}]+")
_RANGE: Final = re.compile(rf"({_FOLDABLE.pattern})(?:\.\.({_FOLDABLE.pattern}))?")
_BRACES: Final = re.compile(r"(\{[^{}]*\})")
_ANY: Final = r"[^.+]+"

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.+-]+")

_NaturalPart: TypeAlias = tuple[bool, int, str]
NaturalKey: TypeAlias = tuple[tuple[tuple[_NaturalPart, ...], ...], str]
"""What `natural_key` gives: its order alone is of use."""
Box: TypeAlias = tuple[tuple[int, ...], ...]
"""The numbers at each numbered position of an FQN, ascending."""
Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""The same numbers as first and last of each run; ascending, with a gap between two runs."""


def natural_key(fqn: str) -> NaturalKey:
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
    return _escape_word(fqn) if fqn else ROOT_TEXT


def write_word(text: str) -> str:
    """Writes any text without whitespace, other characters as `escape` does.

    Unlike names, placements keep their parentheses and commas.
    """
    return _escape_word(text, reserved="\\")


def read_word(text: str) -> str:
    """Reads what `write_word` wrote.

    Raises:
        ValueError: It has an escape that `escape` never writes. The caller checks the rest by
            writing the word again.
    """
    return _ESCAPE.sub(lambda match: _unescape(match, text), text)


def _escape_word(text: str, reserved: Container[str] = _RESERVED) -> str:
    if _PLAIN.fullmatch(text):
        return text
    return "".join(_escape_character(character, reserved) for character in text)


def _escape_character(character: str, reserved: Container[str]) -> str:
    if character.isprintable() and character != " " and character not in reserved:
        return character
    code = ord(character)
    if code <= 0xFF:  # noqa: PLR2004  # two hexadecimal digits reach this far
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004  # four digits


def unescape(text: str) -> str:
    """Reads what `escape` wrote.

    Raises:
        ValueError: `escape` would write it otherwise, or never.
    """
    if not text:
        raise ValueError(f"the name is missing: expected {ROOT_TEXT} for the root")
    return "" if text == ROOT_TEXT else _unescape_word(text)


def _unescape_word(text: str) -> str:
    if not text or _PLAIN.fullmatch(text):
        return text
    name = _ESCAPE.sub(lambda match: _unescape(match, text), text)
    if _escape_word(name) != text:
        raise ValueError(
            f"bad name {quoted_part(text)}: expected {quoted_part(_escape_word(name))}"
        )
    return name


def _unescape(match: re.Match[str], text: str) -> str:
    digits = match[1] or match[2] or match[3]
    if digits is None or int(digits, 16) > 0x10FFFF:  # noqa: PLR2004  # the last code point
        raise ValueError(
            f"bad escape at column {match.start() + 1} of {quoted_part(text)}: expected \\xHH, "
            "\\uHHHH or \\UHHHHHHHH with lower-case hexadecimal digits"
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
        (natural_key(join_words(words, [str(values[0]) for values in box])), words, box)
        for words, points in by_words.items()
        for box in fold_points(points)
    ]
    return tuple(
        escape(words[0]) if not box else _pattern(words, box)
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


def fold_points(points: Sequence[tuple[int, ...]]) -> list[Box]:
    """Partitions points into boxes, innermost numbers first."""
    boxes: list[Box] = [tuple((number,) for number in point) for point in points]
    for axis in reversed(range(len(points[0]))):
        merged: dict[Box, list[int]] = {}
        for box in boxes:
            merged.setdefault(box[:axis] + box[axis + 1 :], []).extend(box[axis])
        boxes = [
            (*others[:axis], tuple(sorted(values)), *others[axis:])
            for others, values in merged.items()
        ]
    return boxes


def join_words(words: Sequence[str], numbers: Sequence[str]) -> str:
    """Puts numbers between words."""
    return words[0] + "".join(
        number + word for number, word in zip(numbers, words[1:], strict=True)
    )


def _pattern(words: Sequence[str], box: Box) -> str:
    escaped = [_escape_word(word) for word in words]
    return join_words(escaped, [write_ranges(runs_of(values)) for values in box])


def write_ranges(ranges: Ranges) -> str:
    """The numbers at one position of a pattern: ``{0..3,7}``, or ``7`` if it is one."""
    written = ",".join(str(a) if a == b else f"{a}..{b}" for a, b in ranges)
    return written if written.isdigit() else f"{{{written}}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A pattern taken apart, whose FQNs are not listed before they are needed."""

    words: tuple[str, ...]
    """The escaped text before, between and after the numbers."""
    box: tuple[Ranges, ...]
    """The numbers at each position."""

    @property
    def size(self) -> int:
        """How many FQNs it stands for, but not more than one above `MAX_NAMES`."""
        size = 1
        for ranges in self.box:
            size = min(size * count_numbers(ranges), MAX_NAMES + 1)
        return size

    def expand(self) -> tuple[str, ...]:
        """Its FQNs, the last number running fastest."""
        words = self._names()
        axes = ([str(n) for a, b in ranges for n in range(a, b + 1)] for ranges in self.box)
        return tuple(join_words(words, numbers) for numbers in product(*axes))

    def _names(self) -> list[str]:
        if self.words == (ROOT_TEXT,):
            return [""]
        return [_unescape_word(word) for word in self.words]


def count_numbers(ranges: Ranges) -> int:
    """How many numbers some runs have."""
    return sum(last - first + 1 for first, last in ranges)


def expand(pattern: str) -> tuple[str, ...]:
    """Lists the FQNs that a pattern stands for, the last number running fastest.

    Raises:
        ValueError: The text is no pattern that `fold_fqns` writes; it says where and what was
            expected.
    """
    return read_pattern(pattern).expand()


def matcher(pattern: str) -> Callable[[str], bool]:
    """Reads a pattern as a question, in which ``*`` stands for one segment or some of one.

    The FQNs are not listed, so that large numbers cost nothing.

    Returns:
        A function that says whether the pattern stands for an FQN.

    Raises:
        ValueError: As `expand`.
    """
    if pattern == ROOT_TEXT:
        return lambda fqn: not fqn
    written, ranges = _split_pattern(pattern)
    words = (_ANY.join(map(_literally, part.split("*"))) for part in written)
    shape = re.compile(f"({_FOLDABLE.pattern})".join(words), re.DOTALL)

    def matches(fqn: str) -> bool:
        found = shape.fullmatch(fqn)
        return found is not None and all(
            any(first <= int(number) <= last for first, last in axis)
            for number, axis in zip(found.groups(), ranges, strict=True)
        )

    return matches


def _literally(written: str) -> str:
    # An asterisk of a name is written with an escape, which no snapshot needs.
    return re.escape(_ESCAPE.sub(lambda match: _unescape(match, written), written))


def _split_pattern(pattern: str) -> tuple[list[str], list[Ranges]]:
    """The text before, between and after the braces, still escaped, and what is in them."""
    parts = _BRACES.split(pattern)
    for brace in "{}":
        if any(brace in part for part in parts[::2]):
            raise ValueError(
                f"unpaired {brace!r} in {quoted_part(pattern)}: expected e.g. layers.{{0..3}}"
            )
    return parts[::2], [_read_ranges(part, pattern) for part in parts[1::2]]


def first_name(pattern: str) -> str:
    """The first of the FQNs that a pattern stands for, which must be one."""
    return unescape(_NUMBERS.sub(r"\1", pattern))


def read_pattern(text: str) -> Pattern:
    """Takes a pattern apart; the work does not grow with the number of its FQNs.

    Raises:
        ValueError: The text is no pattern that `fold_fqns` writes; it says where and what was
            expected.
    """
    tokens = _TOKEN.findall(text)
    if sum(map(len, tokens)) < len(text):
        # Each brace that is left over stands alone.
        brace = _TOKEN.sub("", text)[0]
        raise ValueError(
            f"unpaired {brace!r} in {quoted_part(text)}: expected e.g. layers.{{0..3}}"
        )
    parts: list[list[str]] = [[]]
    box: list[Ranges] = []
    for before, token, after in zip(("", *tokens), tokens, (*tokens[1:], ""), strict=False):
        if token[0] == "{" and (before or ".") in _SEPARATORS and (after or ".") in _SEPARATORS:
            box.append(_read_ranges(token, text))
            parts.append([])
        elif _FOLDABLE.fullmatch(token):
            box.append(((int(token), int(token)),))
            parts.append([])
        else:
            parts[-1].append(token)
    pattern = Pattern(words=tuple(map("".join, parts)), box=tuple(box))
    for word in pattern.words if box else ():
        _unescape_word(word)
    if not box:
        unescape(text)
    if pattern.size > MAX_NAMES:
        raise ValueError(
            f"{quoted_part(text)} stands for too many names: expected at most {MAX_NAMES}"
        )
    return pattern


def _read_ranges(token: str, pattern: str) -> Ranges:
    matches = [_RANGE.fullmatch(part) for part in token[1:-1].split(",")]
    ranges = tuple((int(match[1]), int(match[2] or match[1])) for match in matches if match)
    in_order = all(first <= last for first, last in ranges) and all(
        before[1] + 1 < after[0] for before, after in pairwise(ranges)
    )
    if not all(matches) or not in_order or write_ranges(ranges) != token:
        raise ValueError(
            f"bad numbers {quoted_part(token)[1:-1]} in {quoted_part(pattern)}: expected "
            "ascending numbers and ranges such as {0..3,7}"
        )
    return ranges
