"""Build a `ShardTree` that describes how FSDP1, FSDP2, DDP and DTensor have sharded a model."""
