"""Runs workflows over data under several conditions, scores them, and says how sure the figures are."""
