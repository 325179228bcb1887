"""Whose a collective is: the module, phase and unit that it serves.

In come torch's modules, autograd nodes and FSDP's states, out go names and phases. Knows torch.
"""
