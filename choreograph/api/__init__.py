"""What a user holds: engine, session, message, and the options of a call."""
