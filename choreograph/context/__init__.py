"""Which keys and values a request reads, and where they are."""
