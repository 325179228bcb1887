"""What is sent: events of one rank, folded into a profile, compared, with the causes of a change.

In come `events.Recording`s, out go `profile.CommProfile`s, `diff.Comparison`s and answers. Knows
neither torch nor pytest; may know `text`.
"""
