"""`/openapi.json`, a description of the routes for other tools, and `/docs`, a page made of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from sharp.serving.frontends.http.response_schemas import ERROR, EVENTS, JSON, PLAIN, Schema
from sharp.serving.frontends.http.status_page import PAGE_HEADERS
from sharp.serving.version import sharp_version

REFERENCE = "#/components/schemas/{model}"
DOCS = """<!doctype html><meta charset="utf-8"><title>Sharp: the API</title>
<style>body{font:15px system-ui;max-width:60em;margin:2em auto;padding:0 1em}code{font-size:13px}
summary{cursor:pointer}</style>
<h1>The API</h1><p>From <a href="openapi.json">openapi.json</a>.</p><div id="paths"></div>
<script>
const add = (parent, kind, text) => {
  const element = document.createElement(kind); element.textContent = text; parent.append(element); return element }
fetch("openapi.json").then(response => response.json()).then(api => {
  for (const [path, methods] of Object.entries(api.paths)) for (const [method, what] of Object.entries(methods)) {
    const entry = add(document.getElementById("paths"), "details", "")
    add(entry, "summary", `${method.toUpperCase()} ${path}: ${what.summary}`)
    const reference = what.requestBody?.content["application/json"].schema.$ref
    if (reference) {
      const fields = api.components.schemas[reference.split("/").pop()].properties
      const list = add(entry, "ul", "")
      for (const name of Object.keys(fields)) add(list, "li", name)
    }
  }
})
</script>
"""


@dataclass(frozen=True)
class Operation:
    """The description of a route: a sentence, and the schemas of the request's body, the response, and an error."""

    path: str
    method: str
    summary: str
    body: type[BaseModel] | None = None
    response: Schema | None = None
    streams: bool = False
    failure: Schema = field(default_factory=lambda: ERROR)

    def described(self) -> dict[str, Any]:
        """Return the route as OpenAPI describes it."""
        content = {PLAIN: {}} if self.response is None else {JSON: {"schema": self.response}}
        if self.streams:
            content[EVENTS] = {}
        failed = {JSON: {"schema": self.failure}}
        entry: dict[str, Any] = {
            "summary": self.summary,
            "operationId": f"{self.method} {self.path}",
            "responses": {
                "200": {"description": "the response", "content": content},
                "4XX": {"description": "an error of the request", "content": failed},
                "5XX": {"description": "the server cannot respond now", "content": failed},
            },
        }
        if self.body is not None:
            schema = {"$ref": REFERENCE.format(model=self.body.__name__)}
            entry["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
        return entry


class OpenApi:
    """The description of the routes. It is made at the first request, because that takes a while."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations

    @cached_property
    def text(self) -> bytes:
        """The OpenAPI description of all routes, as the bytes of a JSON document."""
        kinds = {operation.body for operation in self._operations if operation.body is not None}
        ordered = sorted(kinds, key=lambda kind: kind.__name__)
        _, schemas = models_json_schema([(kind, "validation") for kind in ordered], ref_template=REFERENCE)
        paths: dict[str, dict[str, Any]] = {}
        for operation in self._operations:
            paths.setdefault(operation.path, {})[operation.method] = operation.described()
        return json.dumps(
            {
                "openapi": "3.1.0",
                "info": {"title": "Sharp", "version": sharp_version()},
                "paths": paths,
                "components": {
                    "schemas": schemas.get("$defs", {}),
                    "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
                },
            }
        ).encode()

    def routes(self, *, docs: bool) -> list[Route]:
        """Return the route `/openapi.json`, and `/docs` if `docs` is true."""

        def describe(_request: Request) -> Response:  # not async, so it runs in a thread
            """Respond with the description of the API; runs in a thread."""
            return Response(self.text, media_type="application/json")

        async def page(_request: Request) -> Response:
            """Respond with the page that shows the description of the API."""
            return HTMLResponse(DOCS, headers=PAGE_HEADERS)

        return [Route("/openapi.json", describe), *([Route("/docs", page)] if docs else [])]
