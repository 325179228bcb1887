"""The value of the fixture ``fsdp_tree``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fsdp_comm.capture.shards import capture_tree

if TYPE_CHECKING:
    from torch import nn

    from pytest_fsdp_comm.tree import ShardTree


class TreeFactory:
    """Makes the sharded tree of a model."""

    def __call__(self, model: nn.Module) -> ShardTree:
        """How the model is sharded now. Neither runs the model nor sends anything.

        Args:
            model: Any module; usually the FSDP root.

        Raises:
            RecordingError: It is no module.
        """
        return capture_tree(model)
