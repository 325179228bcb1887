"""The plugin's hooks, each a few lines; decisions live in the modules that they call."""

from __future__ import annotations
