"""The OpenAPI schema: routes read raw bodies, so what they take and how they fail is written in here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from longctx.server.schema import REQUESTS

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_FASTAPIS_ERRORS = ("HTTPValidationError", "ValidationError")
"""What FastAPI would answer with a 422, and is never sent."""


def json_body(name: str) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is `REQUESTS[name]`."""
    schema = {"$ref": _REF.format(model=REQUESTS[name].__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI, version: str) -> None:
    """Let `app.openapi()` name the bodies of `json_body`, and one shape for every error."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title="longctx", version=version, routes=app.routes)
            _, models = models_json_schema([(model, "validation") for model in REQUESTS.values()], ref_template=_REF)
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components.update(models["$defs"], Error=_ERROR)
            for name in _FASTAPIS_ERRORS:
                components.pop(name, None)
            _describe_errors(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_errors(document: dict[str, Any]) -> None:
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    for operations in document["paths"].values():
        for operation in operations.values():
            # FastAPI's own shape of a 422 is not what is sent.
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "An error", "content": content}
