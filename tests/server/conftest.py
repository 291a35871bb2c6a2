"""Fixtures of the server's tests."""

from helpers.server_fixtures import client, live  # noqa: F401
