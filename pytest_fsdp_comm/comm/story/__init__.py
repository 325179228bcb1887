"""The shortest true story of a difference: the changes of the whole that explain it, and the rest.

Two profiles enter, a `search.Story` leaves: steps, each with what it rests on, that turn the first
profile into the second. Knows the other files of `comm` and `text`.
"""
