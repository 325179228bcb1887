"""What is wrong with the wrapping of a model: each rule with its code, level, reason and cure.

Trees come in; findings go out. A new finding is one declaration in `mistakes` or `waste`, and its
line in ``docs/fsdp-tree.md``.
"""
