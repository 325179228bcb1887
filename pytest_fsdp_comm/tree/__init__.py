"""How a model is sharded, as values: facts, differences and findings."""
