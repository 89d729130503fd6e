"""Every quality suite by name. A new one is one file with a `SUITE`, and one line here."""

from __future__ import annotations

from longctx.errors import LongctxError
from longctx.evals import drift_suite, niah_suite
from longctx.evals.suite import Suite
from longctx.evals.tasks import suite as tasks_suite

SUITES: dict[str, Suite] = {module.SUITE.name: module.SUITE for module in (niah_suite, tasks_suite, drift_suite)}


def find_suite(name: str) -> Suite:
    """The suite called `name`; raises `LongctxError` naming those there are."""
    if name not in SUITES:
        raise LongctxError(f"there is no suite {name!r}; there are {', '.join(SUITES)}")
    return SUITES[name]
