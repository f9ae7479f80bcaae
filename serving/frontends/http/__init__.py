"""The HTTP API: OpenAI's endpoints, `/metrics`, `/health` and a status page."""
