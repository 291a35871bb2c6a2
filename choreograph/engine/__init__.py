"""The step loop: which calls compute next, how tokens are chosen, and what a finished step changes."""
