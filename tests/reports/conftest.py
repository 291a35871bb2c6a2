"""Fixtures of the tests of public reports."""

from helpers.server_fixtures import client, live  # noqa: F401
