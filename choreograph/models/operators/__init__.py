"""Operators of decoder layers on CPUs."""
