"""Features that change which keys and values a request reads."""
