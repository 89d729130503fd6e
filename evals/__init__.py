"""Quality and speed suites on the public API."""
