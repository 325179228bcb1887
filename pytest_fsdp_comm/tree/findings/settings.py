"""Which findings a project wants, at which level and from which size on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from pytest_fsdp_comm.tree.findings.thresholds import Thresholds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_fsdp_comm.tree.finding import Finding
    from pytest_fsdp_comm.tree.findings.rule import Rule
    from pytest_fsdp_comm.tree.model import ShardTree

# The rules are imported where they are needed: every pytest session reads these settings.

RuleLevel = Literal["error", "warning", "off"]

_Subject = TypeVar("_Subject")


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingSettings:
    """What counts as a finding."""

    levels: Mapping[str, RuleLevel] = field(default_factory=dict)
    """Code -> level, of those whose level is not their rule's own."""
    thresholds: Thresholds = field(default_factory=Thresholds)

    def findings(self, tree: ShardTree) -> tuple[Finding, ...]:
        """The wrapping mistakes of a tree, errors first."""
        from pytest_fsdp_comm.tree.findings.rules import TREE_RULES  # noqa: PLC0415  # see above

        found = [finding for rule in TREE_RULES for finding in self._apply(rule, tree)]
        return tuple(sorted(found, key=lambda finding: finding.level != "error"))

    @property
    def compares_ranks(self) -> bool:
        """Whether the project wants the trees of the ranks compared."""
        from pytest_fsdp_comm.tree.findings.mistakes import ranks_differ  # noqa: PLC0415  # see above

        return self._level(ranks_differ) != "off"

    def findings_of_ranks(self, texts: Mapping[int, str]) -> tuple[Finding, ...]:
        """Compares the trees of all ranks.

        Args:
            texts: What `pytest_fsdp_comm.snapshots.tree_text.format_tree` writes, by rank.
        """
        from pytest_fsdp_comm.tree.findings.mistakes import ranks_differ  # noqa: PLC0415  # see above

        return self._apply(ranks_differ, texts)

    def _level(self, rule: Rule[_Subject]) -> RuleLevel:
        return self.levels.get(rule.code, rule.level)

    def _apply(self, rule: Rule[_Subject], subject: _Subject) -> tuple[Finding, ...]:
        level = self._level(rule)
        return () if level == "off" else tuple(rule.findings(subject, self.thresholds, level))


def parse_settings(lines: Iterable[str]) -> FindingSettings:
    """Reads the lines of the ini value ``fsdp_comm_findings``.

    Args:
        lines: ``<code> = error``, ``warning`` or ``off``; or a threshold of `Thresholds` such as
            ``small_nbytes = 4096``. ``all = off`` sets every code; later lines win.

    Raises:
        ValueError: A line is neither; the text says what is allowed.
    """
    given = [line for line in map(str.strip, lines) if line]
    if not given:
        return FindingSettings()
    from pytest_fsdp_comm.tree.findings.rules import RULES  # noqa: PLC0415  # see above

    codes = [rule.code for rule in RULES]
    levels: dict[str, RuleLevel] = {}
    thresholds: dict[str, Any] = {entry.name: entry.default for entry in fields(Thresholds)}
    for line in given:
        name, equals, value = (word.strip() for word in line.partition("="))
        if equals and name in thresholds:
            thresholds[name] = _threshold(name, value)
        elif equals and (name in codes or name == "all"):
            if value not in get_args(RuleLevel):
                raise ValueError(
                    f"fsdp_comm_findings: {name}: expected one of {', '.join(get_args(RuleLevel))},"
                    f" got {value!r}"
                )
            chosen = codes if name == "all" else [name]
            levels.update(dict.fromkeys(chosen, cast("RuleLevel", value)))
        else:
            raise ValueError(
                f"fsdp_comm_findings: cannot read {line!r}; expected '<code> = error|warning|off' "
                f"with a code of {', '.join(codes)}, or all; or a threshold of "
                f"{', '.join(thresholds)}, such as small_nbytes = 4096"
            )
    return FindingSettings(levels=levels, thresholds=Thresholds(**thresholds))


def _threshold(name: str, value: str) -> int | float:
    is_share = name == "padding_share"
    try:
        number = float(value) if is_share else int(value)
    except ValueError:
        number = -1
    if number < 0:
        kind = "a share such as 0.1" if is_share else "a whole number of bytes"
        raise ValueError(f"fsdp_comm_findings: {name}: expected {kind}, got {value!r}")
    return number
