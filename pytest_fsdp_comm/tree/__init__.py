"""How a model is sharded: units and parameters, as values that compare and can be written."""
