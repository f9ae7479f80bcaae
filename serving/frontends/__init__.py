"""The API frontends: gRPC (`sharp.v1`), HTTP (OpenAI) and KServe."""
