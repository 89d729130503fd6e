"""Errors as OpenAI's clients expect them: a status, a type, a code, the parameter, one clear line."""

from __future__ import annotations

from typing import Any

_STATUS = {
    "queue_full": (429, "rate_limit_error"),
    "engine_error": (500, "server_error"),
    "engine_restarting": (503, "server_error"),
    "draining": (503, "server_error"),
    "deadline_exceeded": (504, "timeout_error"),
}
"""Codes that are not the request's fault; every other is 400, invalid_request_error."""


class ApiError(Exception):
    """One refused or failed HTTP request. `retry_after_s` becomes the header Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is rebuilt from its message alone, which this one's arguments do not allow.
        return (_rebuild, (dict(vars(self)),))

    @classmethod
    def from_code(cls, code: str, message: str, retry_after_s: float | None = None) -> ApiError:
        """The HTTP form of an error that the engine named by its code."""
        status, kind = _STATUS.get(code, (400, "invalid_request_error"))
        return cls(status, message, type=kind, code=code, retry_after_s=retry_after_s)

    def body(self) -> dict[str, Any]:
        """The JSON of the response, or of an `error` event in a stream that has begun."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """The response headers that belong to it: when to come back, how to say who one is."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def _rebuild(fields: dict[str, Any]) -> ApiError:
    return ApiError(**fields)
