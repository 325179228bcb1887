"""The shortest true explanation of a difference: the changes of the whole, and the rest."""
