"""Batches: forward passes, sampling, drafts."""
