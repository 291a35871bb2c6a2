"""Helpers shared by the tests: oracles, model factories, random message graphs."""
