"""The whole command line, as a user runs it."""

from choreograph.__main__ import build_app

app = build_app()
