"""The shortest true explanation of a difference: the changes of the whole, and the rest.

Two profiles enter, a `search.Explanation` leaves: steps, each with its sentence and its cause,
that turn the first profile into the second. Knows the other files of `comm` and `text`.
"""
