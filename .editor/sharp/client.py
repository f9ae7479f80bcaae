"""Clients of a Sharp server."""

from sharp.serving.client import AsyncClient, Client, ClientTls
from sharp.serving.api.events import Delta, Finished
from sharp.serving.api.errors import SharpError
from sharp.serving.api.guided import Guided
from sharp.serving.api.sampling_params import SamplingParams

__all__ = ["AsyncClient", "Client", "ClientTls", "Delta", "Finished", "Guided", "SamplingParams", "SharpError"]
