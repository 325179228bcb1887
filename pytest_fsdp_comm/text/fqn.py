"""Fully qualified names (FQNs) as text: escape them, sort them, fold numbered siblings."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import pairwise, product
from typing import Final, TypeAlias

from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.text.rank_lists import find_runs
from pytest_fsdp_comm.text.words import join_first

# A pattern describes one or more FQNs: `layers.{0..3,7}.mlp.weight` describes five. `fold_fqns`
# writes FQNs as patterns, and `expand` lists the FQNs of a pattern. `expand` accepts any valid
# pattern, even if `fold_fqns` would write it differently; to detect that, fold the FQNs again.

# The text for the root, whose FQN is empty. It is unique: `escape` replaces parentheses in names.
ROOT_TEXT: Final = "(root)"

# Written instead of a module name in rows without a module.
NO_MODULE: Final = "(no-module)"

# The most FQNs that a pattern may describe; `expand` raises ValueError if there are more.
MAX_NAMES: Final = 131_072

_RESERVED: Final = frozenset("\\{}(),#")
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))|\\")
_DIGITS: Final = re.compile(r"([0-9]+)")
# Names are split at `+` as well as `.`, because `+` joins the modules of one FSDP unit.
_SEPARATOR: Final = re.compile(r"([.+])")
# A number of at most nine digits, so that any program can read it. No module list is longer.
_FOLDABLE: Final = re.compile(r"0|[1-9][0-9]{0,8}")
_RANGE: Final = re.compile(rf"({_FOLDABLE.pattern})(?:\.\.({_FOLDABLE.pattern}))?")
_BRACES: Final = re.compile(r"(\{[^{}]*\})")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.+-]+")

_NaturalPart: TypeAlias = tuple[bool, int, str]
NaturalKey: TypeAlias = tuple[tuple[tuple[_NaturalPart, ...], ...], str]
# The values of each number in a pattern, ascending; the pattern describes all their combinations.
Box: TypeAlias = tuple[tuple[int, ...], ...]
# The values of one number, as ascending runs `(first, last)` with gaps between them.
Ranges: TypeAlias = tuple[tuple[int, int], ...]


def natural_key(fqn: str) -> NaturalKey:
    """Return a key that sorts parents before children, and ``layers.2`` before ``layers.10``."""
    segments = tuple(
        tuple(_natural_key_of_part(part) for part in _DIGITS.split(segment) if part)
        for segment in fqn.split(".")
        if fqn
    )
    return segments, fqn


def _natural_key_of_part(part: str) -> _NaturalPart:
    if not _DIGITS.fullmatch(part):
        return (True, 0, part)
    # Compare by length, then as text, because int() rejects more than 4300 digits.
    significant = part.lstrip("0")
    return (False, len(significant), significant)


def escape(fqn: str) -> str:
    """Return an FQN as one word, with reserved characters escaped; `ROOT_TEXT` for the root."""
    return _escape_word(fqn) if fqn else ROOT_TEXT


def write_word(text: str) -> str:
    """Return text as one word; unlike `escape`, do not escape characters such as ``(`` or ``,``."""
    return _escape_word(text, reserved="\\")


def read_word(text: str) -> str:
    """Read the output of `write_word`; raise ValueError for an invalid escape."""
    # To reject superfluous escapes, callers write the word again and compare.

    def unescape(match: re.Match[str]) -> str:
        digits = match[1] or match[2] or match[3]
        if digits is None or int(digits, 16) > sys.maxunicode:
            raise ValueError(
                f"bad escape at column {match.start() + 1} of {quoted_part(text)}: expected \\xHH, "
                "\\uHHHH or \\UHHHHHHHH with lower-case hexadecimal digits"
            )
        return chr(int(digits, 16))

    return _ESCAPE.sub(unescape, text)


def _escape_word(text: str, reserved: Container[str] = _RESERVED) -> str:
    if _PLAIN.fullmatch(text):
        return text
    return "".join(
        character
        if character.isprintable() and character != " " and character not in reserved
        else next(
            f"\\{letter}{ord(character):0{width}x}"
            for letter, width in (("x", 2), ("u", 4), ("U", 8))
            if ord(character) < 16**width
        )
        for character in text
    )


def unescape(text: str) -> str:
    """Read the output of `escape`; raise ValueError for an invalid escape."""
    return "" if text == ROOT_TEXT else read_word(text)


def fold_fqns(fqns: Iterable[str]) -> tuple[str, ...]:
    """Fold FQNs into patterns, sorted by the natural order of each pattern's first FQN."""
    # Fold inner numbers first, so that a block that differs gets a separate pattern: with eight
    # experts in layers 0 to 2 and four in layer 3, the patterns are `layers.{0..2}.experts.{0..7}`
    # and `layers.3.experts.{0..3}`.
    by_words: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for fqn in dict.fromkeys(fqns):
        words, numbers = _split_words_and_numbers(fqn)
        by_words.setdefault(words, []).append(numbers)
    folded = [
        (
            natural_key(_join_words_and_numbers(words, [str(values[0]) for values in box])),
            _write_pattern(words, box),
        )
        for words, points in by_words.items()
        for box in _merge_points_to_boxes(points)
    ]
    return tuple(pattern for _, pattern in sorted(folded, key=lambda entry: entry[0]))


def name_owners(owners: Iterable[str | None], *, most: int = 3, noun: str = "modules") -> str:
    """List owners (None for no module) as patterns: ``(root), layers.{0..3} and 2 more``.

    If there are many patterns, name what contains them: ``12 modules in student, teacher``.
    """
    listed = list(owners)
    names = [name for name in listed if name is not None]
    outside = [NO_MODULE] if None in listed else []
    patterns = [*fold_fqns(names), *outside]
    if len(patterns) <= 2 * most:
        return join_first(patterns, most)
    return " and ".join([name_containers(names, most=most, noun=noun), *outside])


def name_containers(names: Sequence[str], *, most: int, noun: str) -> str:
    """Count the names, and list at most `most` patterns of modules that contain them."""
    # A unit of several modules joins their names.
    modules = [part for name in names for part in name.split("+")]
    while len(folded := fold_fqns(modules)) > most and any(modules):
        deepest = max(name.count(".") for name in modules)
        modules = [
            name.rpartition(".")[0] if name.count(".") == deepest else name for name in modules
        ]
    where = f"in {', '.join(folded)}" if any(modules) else "of the model"
    return f"{len(names)} {noun} {where}"


def _split_words_and_numbers(fqn: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Split an FQN into its numbers and the text around them."""
    words = [""]
    numbers: list[int] = []
    for token in _SEPARATOR.split(fqn):
        if _FOLDABLE.fullmatch(token):
            numbers.append(int(token))
            words.append("")
        else:
            words[-1] += token
    return tuple(words), tuple(numbers)


def _merge_points_to_boxes(points: Sequence[tuple[int, ...]]) -> list[Box]:
    """Merge points into boxes, innermost number first; a point holds the numbers of one FQN."""
    boxes: list[Box] = [tuple((number,) for number in point) for point in points]
    for axis in reversed(range(len(points[0]))):
        merged: dict[Box, list[int]] = {}
        for box in boxes:
            merged.setdefault(box[:axis] + box[axis + 1 :], []).extend(box[axis])
        boxes = [
            (*box[:axis], tuple(sorted(values)), *box[axis:]) for box, values in merged.items()
        ]
    return boxes


def _join_words_and_numbers(words: Sequence[str], numbers: Sequence[str]) -> str:
    return words[0] + "".join(map("".join, zip(numbers, words[1:], strict=True)))


def _write_pattern(words: Sequence[str], box: Box) -> str:
    if not box:
        return escape(words[0])
    numbers = [_write_ranges(find_runs(values)) for values in box]
    return _join_words_and_numbers([_escape_word(word) for word in words], numbers)


def _write_ranges(ranges: Ranges) -> str:
    written = ",".join(str(a) if a == b else f"{a}..{b}" for a, b in ranges)
    return written if written.isdigit() else f"{{{written}}}"


def expand(pattern: str) -> tuple[str, ...]:
    """List the FQNs of a pattern, varying the last number fastest, or raise ValueError."""
    literals, axes = _split_pattern(pattern)
    words = [unescape(literal) for literal in literals]
    sizes = (sum(last - first + 1 for first, last in ranges) for ranges in axes)
    if math.prod(sizes) > MAX_NAMES:
        raise ValueError(
            f"{quoted_part(pattern)} expands to too many names: expected at most {MAX_NAMES}"
        )
    numbers = ([str(n) for a, b in ranges for n in range(a, b + 1)] for ranges in axes)
    return tuple(_join_words_and_numbers(words, chosen) for chosen in product(*numbers))


def make_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a predicate for FQNs that match `pattern`; ``*`` matches a segment or part of one."""
    if pattern == ROOT_TEXT:
        return lambda fqn: not fqn
    literals, ranges = _split_pattern(pattern)
    # Every `*` is a wildcard; an asterisk in a name must be escaped.
    words = (
        "[^.+]+".join(re.escape(read_word(part)) for part in word.split("*")) for word in literals
    )
    shape = re.compile(f"({_FOLDABLE.pattern})".join(words), re.DOTALL)

    def matches(fqn: str) -> bool:
        match = shape.fullmatch(fqn)
        return match is not None and all(
            any(first <= int(number) <= last for first, last in axis)
            for number, axis in zip(match.groups(), ranges, strict=True)
        )

    return matches


def _split_pattern(pattern: str) -> tuple[list[str], list[Ranges]]:
    """Split a pattern into the text outside braces and the ranges inside them."""
    parts = _BRACES.split(pattern)
    brace = next((character for character in "".join(parts[::2]) if character in "{}"), "")
    if brace:
        raise ValueError(
            f"unpaired {brace!r} in {quoted_part(pattern)}: expected e.g. layers.{{0..3}}"
        )
    return parts[::2], [_read_ranges(part, pattern) for part in parts[1::2]]


def first_fqn(pattern: str) -> str:
    """Return the first FQN that a valid pattern describes."""
    return unescape(re.sub(r"\{([0-9]+)[^{}]*\}", r"\1", pattern))


def _read_ranges(token: str, pattern: str) -> Ranges:
    matches = [_RANGE.fullmatch(part) for part in token[1:-1].split(",")]
    ranges = tuple((int(match[1]), int(match[2] or match[1])) for match in matches if match)
    in_order = all(first <= last for first, last in ranges) and all(
        before[1] + 1 < after[0] for before, after in pairwise(ranges)
    )
    if not all(matches) or not in_order or _write_ranges(ranges) != token:
        raise ValueError(
            f"bad numbers {quoted_part(token)[1:-1]} in {quoted_part(pattern)}: expected "
            "ascending numbers and ranges such as {0..3,7}"
        )
    return ranges
