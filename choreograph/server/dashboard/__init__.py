"""Dashboard of a server."""
