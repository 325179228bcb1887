"""Values that describe how a model is sharded: facts, differences and findings."""
