"""OpenAI-compatible HTTP server with reuse of messages and quotes (extra `serve`)."""
