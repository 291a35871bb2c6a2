"""Kernels of linear layers."""
