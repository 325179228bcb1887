"""What is wrong with the wrapping of a model: each rule with its code, level, reason and cure.

In come trees, out go findings. May know the tree's model. A new finding is one declaration in
`mistakes` or `waste`, and its line in ``docs/fsdp-tree.md``.
"""
