"""What the trees of a test say that its communication cannot: why rows came, went or changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What two trees say of the units that both have; names as those of owners."""

    units: frozenset[str]
    frozen: frozenset[str] = frozenset()
    """Those whose trainable parameters are all frozen now."""
    partly_frozen: frozenset[str] = frozenset()
    """Those of which some parameters are frozen now, and others trainable."""
    thawed: frozenset[str] = frozenset()
    """Those of which some parameters are trainable now that were frozen."""
    policies: Mapping[str, str]
    """As `tree.profile.policy_change` words it, of those with another policy after forward."""
    new_roots: frozenset[str] = frozenset()
    is_other_dtype: bool = False
    is_other_policy: bool = False
    """Whether units that both have got another mixed precision."""
    is_reduce_dtype_unset: bool = False
    """Whether, on both sides, all units with a `param_dtype` are FSDP2's, and set no
    `reduce_dtype`."""
