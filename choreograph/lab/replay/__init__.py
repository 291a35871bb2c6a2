"""Recorded runs again: their calls without a model, and one pass over all of them."""
