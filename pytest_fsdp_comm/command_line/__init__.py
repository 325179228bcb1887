"""The program ``fsdp-comm``: show, compare, accept and record communication."""
