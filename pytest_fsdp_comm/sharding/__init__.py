"""How torch has sharded a model, read from FSDP1, FSDP2, DDP and DTensor.

In comes a model, out goes a `tree.model.ShardTree`. Knows torch; may know `tree` and `recording`.
"""
