"""An OpenAI-compatible HTTP server in front of the public engine API."""
