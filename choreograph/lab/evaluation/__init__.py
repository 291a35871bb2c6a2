"""Run workflows over data under several conditions and score the runs."""
