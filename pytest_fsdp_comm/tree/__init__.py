"""How a model is sharded: units and parameters, as values that compare and can be written.

`model.ShardTree`s come in; facts, differences and findings go out.
"""
