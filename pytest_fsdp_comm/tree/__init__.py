"""How a model is sharded: units and parameters, as values that compare and can be written.

In come `model.ShardTree`s, out go facts, differences and findings. Knows neither torch nor pytest;
may know `text` and the mesh axes of `comm`.
"""
