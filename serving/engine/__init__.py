"""The engine: what a step is, which requests take part in it and which tokens come out."""
