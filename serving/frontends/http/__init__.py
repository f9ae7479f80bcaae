"""The HTTP API: OpenAI's, Anthropic's and KServe's endpoints, `/metrics`, `/health` and a status page."""
