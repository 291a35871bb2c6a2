"""Tensor mathematics of placed attention: plans and the backends that carry them out. Knows no messages."""
