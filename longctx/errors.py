"""The one family of errors a user can cause: each names the value and the remedy, in one line."""

from __future__ import annotations


class LongctxError(ValueError):
    """Base of every error that a user's input or machine can cause. The command line prints it and exits with 2.

    `code` is its short name for programs, as the server answers it.
    """

    code = "invalid_request"


class ModelError(LongctxError):
    """A model that is missing, corrupt, unsupported or unverified."""


class RequestError(LongctxError):
    """A request that can never be served as given: empty, absurd options, longer than the model."""


class ContextLengthError(RequestError):
    """Prompt and answer are longer than the model's positions; the text has both numbers and what would fit."""

    code = "context_length_exceeded"


class DoesNotFitError(RequestError):
    """A request that can never fit in this engine's memory; the text names the smallest change that makes it fit."""

    code = "kv_memory_exceeded"


class QueueFullError(LongctxError):
    """The bounded queue has no room now; the same request may succeed later."""

    code = "queue_full"


class EngineError(RuntimeError):
    """The engine failed inside a step; not the user's fault, the cause is chained."""
