"""Reviewed files: their names, their text, their comparison, and which of them no test needs.

In come profiles and trees, out go verdicts, files and explanations. Alone in knowing syrupy; may
know `comm`, `tree` and `reports`, but neither torch nor ranks.
"""
