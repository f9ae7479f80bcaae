"""The application for `serve run sharp.ray.application:build models='["FOLDER"]'`, and for a configuration of Serve."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ray.serve import Application
from sharp.ray.replica import ModelServer
from sharp.serving.api.errors import InputError
from sharp.serving.server.settings_sources import read_settings


class Arguments(BaseModel):
    """The arguments of an application. The number of replicas and their resources are settings of Ray Serve."""

    model_config = ConfigDict(extra="forbid")

    models: list[str] = Field(
        min_length=1,
        description="Model folders, the same ones on every node. The first is for requests without a model.",
    )
    models_per_replica: int = Field(
        default=1, ge=1, description="Models that a replica holds at a time; the one used longest ago goes for another."
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of every replica for its own /metrics, on the setting host; 0 is any."
        " A replica with a GPU adds the number of it.",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of sharp-serve. Ports and TLS are Serve's; threads are the processors of the replica.",
    )


def build(arguments: Arguments) -> Application:
    """Return the application for Ray Serve. Its replicas load the models, not this function.

    Raises:
        InputError: a setting is unknown or cannot be used, or is a port or TLS, which Serve sets.
    """
    for name in ("grpc_port", "http_port"):
        if name in arguments.settings:
            raise InputError(f"{name}: ports are Serve's: grpc_options and http_options")
    if read_settings(arguments.settings, None).server.tls is not None:
        raise InputError("tls_cert: TLS is not Serve's: end it before the cluster")
    application: Application = ModelServer.bind(**arguments.model_dump())  # type: ignore[attr-defined]
    return application
