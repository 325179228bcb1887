"""Known ways in which communication goes wrong, recognised by their pattern.

A cause is named only where its whole pattern is there; a wrong guess costs more than none. The
patterns are those of regressions that were reported: see ``tests/regressions``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import ROOT_FQN, Phase
from pytest_fsdp_comm.text.fqn import fold_fqns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_fsdp_comm.comm.profile import CommProfile, CommRow

_Counts = dict[tuple[Phase, str], int]
"""(phase, kind) -> count, of one module."""

_FORWARD, _BACKWARD = Phase.FORWARD, Phase.BACKWARD
_MOST_NAMED: Final = 3


def find_causes(old: CommProfile, new: CommProfile) -> tuple[str, ...]:
    """Names the probable causes of a difference, the most specific first."""
    before, after = _counts(old), _counts(new)
    finders = (
        _root_not_sharded(before, after),
        _gathered_per_use(before, after),
        _reduced_per_micro_batch(before, after, _grown(old, new)),
        _gathered_in_recompute(before, after),
        _reshard_policy(before, after),
        _became_replicated(before, after),
        _redistributed(old, new),
        _gathered_outside(old, new),
        _renamed(old, new),
        _bytes_scaled(old, new),
    )
    return tuple(dict.fromkeys(cause for finder in finders for cause in finder))


def _counts(profile: CommProfile) -> dict[str, _Counts]:
    modules: defaultdict[str, _Counts] = defaultdict(lambda: defaultdict(int))
    for row in profile.rows:
        if row.owner is not None and 0 in (row.ranks or (0,)):
            modules[row.owner][row.phase, row.kind] += row.count
    return {owner: dict(counts) for owner, counts in modules.items()}


def _get(counts: dict[str, _Counts], owner: str, phase: Phase, kind: str) -> int:
    return counts.get(owner, {}).get((phase, kind), 0)


def _names(owners: Iterable[str]) -> str:
    patterns = fold_fqns(owners)
    more = len(patterns) - _MOST_NAMED
    shown = ", ".join(patterns[:_MOST_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown


def _root_not_sharded(before: dict[str, _Counts], after: dict[str, _Counts]) -> Iterator[str]:
    had_root = _get(before, ROOT_FQN, _FORWARD, "all_gather") > 0
    has_root = any(kind == "all_gather" for _, kind in after.get(ROOT_FQN, {}))
    if had_root and not has_root and after:
        yield (
            "the root is no longer an FSDP unit (is its fully_shard(model) missing?): its own "
            "parameters are not sharded, their gradients are not reduced, and each block became a "
            "root of its own"
        )


def _gathered_per_use(before: dict[str, _Counts], after: dict[str, _Counts]) -> Iterator[str]:
    for owner, counts in after.items():
        now = counts.get((_FORWARD, "all_gather"), 0)
        was = _get(before, owner, _FORWARD, "all_gather")
        if now > 1 and now > max(was, 1) and not _others_grew(before, after, owner):
            yield (
                f"{_names([owner])} is called {now} times in one forward (per chunk of the loss?) "
                "and gathered for each call: unshard it once around the loop, or leave it in its "
                "parent's unit"
            )


def _others_grew(before: dict[str, _Counts], after: dict[str, _Counts], owner: str) -> bool:
    """Whether every other module grew too, as with one more micro-batch."""
    others = [name for name in after if name != owner and name in before]
    return bool(others) and all(
        _get(after, name, _FORWARD, "all_gather") > _get(before, name, _FORWARD, "all_gather")
        for name in others
    )


def _grown(old: CommProfile, new: CommProfile) -> set[tuple[str | None, str]]:
    """Owners and kinds of which more bytes are sent in backward."""

    def nbytes(profile: CommProfile) -> Counter[tuple[str | None, str]]:
        found: Counter[tuple[str | None, str]] = Counter()
        for row in profile.rows:
            if row.phase is _BACKWARD and 0 in (row.ranks or (0,)):
                found[row.owner, row.kind] += row.nbytes
        return found

    before = nbytes(old)
    return {key for key, sent in nbytes(new).items() if sent > before[key]}


def _reduced_per_micro_batch(
    before: dict[str, _Counts],
    after: dict[str, _Counts],
    grown_bytes: set[tuple[str | None, str]],
) -> Iterator[str]:
    for kind in ("reduce_scatter", "all_reduce"):
        grown = [
            owner
            for owner in after
            if _get(before, owner, _BACKWARD, kind) > 0
            and _get(after, owner, _BACKWARD, kind) > _get(before, owner, _BACKWARD, kind)
            # More and smaller buckets reduce each gradient once.
            and (owner, kind) in grown_bytes
            and _get(after, owner, _FORWARD, "all_gather")
            == _get(before, owner, _FORWARD, "all_gather")
            and _get(after, owner, _BACKWARD, "all_gather")
            == _get(before, owner, _BACKWARD, "all_gather")
        ]
        if grown:
            switch = (
                "set_requires_gradient_sync(False)"
                if kind == "reduce_scatter"
                else "set_requires_all_reduce(False)"
            )
            yield (
                f"gradients of {_names(grown)} are reduced more often for the same forwards (once "
                f"per micro-batch?): call {switch} before all micro-batches but the last"
            )


def _gathered_in_recompute(before: dict[str, _Counts], after: dict[str, _Counts]) -> Iterator[str]:
    grown = [
        owner
        for owner in after
        if _get(after, owner, Phase.RECOMPUTE, "all_gather")
        > _get(before, owner, Phase.RECOMPUTE, "all_gather")
    ]
    if grown:
        yield (
            f"{_names(grown)} is gathered again while a checkpointed forward is recomputed: the "
            "recomputation repeats the prefetching of set_modules_to_forward_prefetch (checkpoint "
            "with use_reentrant=True does; use_reentrant=False does not)"
        )


def _reshard_policy(before: dict[str, _Counts], after: dict[str, _Counts]) -> Iterator[str]:
    kept, freed = [], []
    for owner in after:
        # What is not gathered in forward was not freed after it: a DTensor's gradient, say.
        gathers = _get(after, owner, _FORWARD, "all_gather")
        if gathers == 0 or gathers != _get(before, owner, _FORWARD, "all_gather"):
            continue
        was = _get(before, owner, _BACKWARD, "all_gather")
        now = _get(after, owner, _BACKWARD, "all_gather")
        if was > 0 and now == 0:
            kept.append(owner)
        elif was == 0 and now > 0:
            freed.append(owner)
    if kept:
        yield (
            f"{_names(kept)} stays gathered between forward and backward (reshard_after_forward "
            "became False, or the unit became a root): less traffic, more memory"
        )
    if freed:
        yield (
            f"{_names(freed)} is freed after forward and gathered again in backward "
            "(reshard_after_forward became True)"
        )


def _became_replicated(before: dict[str, _Counts], after: dict[str, _Counts]) -> Iterator[str]:
    moved = [
        owner
        for owner in before
        if _get(before, owner, _BACKWARD, "reduce_scatter") > 0
        and _get(after, owner, _BACKWARD, "reduce_scatter") == 0
        and _get(after, owner, _BACKWARD, "all_reduce")
        > _get(before, owner, _BACKWARD, "all_reduce")
    ]
    if moved:
        yield (
            f"{_names(moved)} is replicated instead of sharded: its gradients are all-reduced, and "
            "its parameters no longer gathered"
        )


def _redistributed(old: CommProfile, new: CommProfile) -> Iterator[str]:
    """Activations of tensor-parallel modules that change their placements in forward."""
    known = {(row.owner, row.change) for row in old.redistributions}
    came: defaultdict[str, list[str]] = defaultdict(list)
    for row in new.redistributions:
        is_new = row.owner is not None and (row.owner, row.change) not in known
        if is_new and row.phase is _FORWARD:
            came[row.change].append(row.owner or ROOT_FQN)
    for change, owners in sorted(came.items()):
        source, _, target = change.partition("->")
        yield (
            f"a DTensor of {_names(owners)} is redistributed from {source} to {target}: the "
            "layouts in its plan and in that of the module before it no longer match"
        )


def _gathered_outside(old: CommProfile, new: CommProfile) -> Iterator[str]:
    """DTensors made whole beside the training step."""

    def whole(profile: CommProfile) -> int:
        return sum(
            row.count
            for row in profile.redistributions
            if row.phase is Phase.OUTSIDE and "Shard" not in row.change.partition("->")[2]
        )

    grown = whole(new) - whole(old)
    if grown > 0:
        yield (
            f"redistributions that make DTensors whole outside the step: {grown} more than before "
            "(full_tensor(), or a parameter that is printed or logged?)"
        )


def _renamed(old: CommProfile, new: CommProfile) -> Iterator[str]:
    """The same rows under other names, one to one."""

    def contents(profile: CommProfile) -> dict[str, list[tuple[object, ...]]]:
        found: defaultdict[str, list[tuple[object, ...]]] = defaultdict(list)
        for row in profile.rows:
            if row.owner is not None:
                found[row.owner].append((row.phase, row.kind, row.axis, row.calls))
        return found

    before, after = contents(old), contents(new)
    gone = [owner for owner in before if owner not in after]
    came = [owner for owner in after if owner not in before]
    if not gone or len(gone) != len(came):
        return
    if sorted(map(repr, (before[owner] for owner in gone))) == sorted(
        map(repr, (after[owner] for owner in came))
    ):
        yield f"modules were renamed or moved: {_names(gone)} is now {_names(came)}"


def _bytes_scaled(old: CommProfile, new: CommProfile) -> Iterator[str]:
    """Equal counts everywhere, and all bytes in one ratio: another dtype."""
    before = {(row.key, row.ranks): row for row in old.rows}
    after = {(row.key, row.ranks): row for row in new.rows}
    if before.keys() != after.keys():
        return
    pairs = [(before[key], after[key]) for key in before]
    if any(was.count != now.count for was, now in pairs):
        return
    changed = [(was, now) for was, now in pairs if was.nbytes != now.nbytes]
    if any(_dtypes(was) == _dtypes(now) for was, now in changed):
        return
    for factor, text in ((2, "twice"), (0.5, "half")):
        if changed and all(now.nbytes == was.nbytes * factor for was, now in changed):
            yield (
                f"the same collectives carry {text} the bytes, in another dtype "
                "(MixedPrecisionPolicy, or the model's own)"
            )


def _dtypes(row: CommRow) -> set[str]:
    return {calls.dtype for calls in row.calls}
