"""The HTTP edge: the API of OpenAI, `/metrics` and `/health`; what a step is, it does not know."""
