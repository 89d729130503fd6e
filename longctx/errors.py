"""The one family of errors a user can cause: each names the value and the remedy, in one line."""

from __future__ import annotations


class LongctxError(ValueError):
    """Base of every error that a user's input or machine can cause. The command line prints it and exits with 2."""


class ModelError(LongctxError):
    """A model that is missing, corrupt, unsupported or unverified."""


class RequestError(LongctxError):
    """A request that can never be served as given: empty, absurd options, longer than the model."""


class DoesNotFitError(RequestError):
    """A request that can never fit in this engine's memory; the text names the smallest change that makes it fit."""


class QueueFullError(LongctxError):
    """The bounded queue has no room now; the same request may succeed later."""


class EngineError(RuntimeError):
    """The engine failed inside a step; not the user's fault, the cause is chained."""
