"""How torch has sharded a model, read from FSDP1, FSDP2, DDP and DTensor as a `ShardTree`."""
