"""The HTTP server: one process for HTTP, JSON, tokens and templates, another for the engine."""
