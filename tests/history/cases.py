"""All cases: importing a family's file adds its own."""

from history import gradients, layouts, outside, parameters
from history.reported import HISTORY

__all__ = ["HISTORY", "gradients", "layouts", "outside", "parameters"]
