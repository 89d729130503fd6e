"""How one rank's partial attention becomes the whole: the identity here, a merge over ranks later."""

from __future__ import annotations

from typing import Protocol

from longctx.attention.state import AttnState


class Group(Protocol):
    """A set of ranks that share one sequence's cache."""

    size: int

    def combine(self, state: AttnState) -> AttnState:
        """The merge of every rank's state, the same on every rank, whatever the order of arrival."""
        ...


class SoloGroup:
    """The group of one rank."""

    size = 1

    def combine(self, state: AttnState) -> AttnState:
        return state
