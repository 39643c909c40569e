"""Engines turn dloss/dscores into gradients of a model. They know no algorithm by name."""
