"""Sessions of an engine in another process."""
