"""The engine on several machines, as a deployment of Ray Serve: `serve run sharp.ray.application:build`."""
