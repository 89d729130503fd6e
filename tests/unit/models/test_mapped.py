"""Mapped weights give their pages back and keep their values; ordinary memory is never touched."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from longctx.models.mapped import drop_pages
from tests.helpers.resident import resident_bytes


def test_pages_are_dropped_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    first, second = torch.randn(1000, 1000), torch.randn(1000, 1000)
    save_file({"first": first, "second": second}, path)
    with safe_open(path, framework="pt") as tensors:
        mapped = {name: tensors.get_tensor(name) for name in ("first", "second")}
    assert torch.equal(mapped["first"], first) and torch.equal(mapped["second"], second)
    before = resident_bytes(path)
    dropped = drop_pages(mapped["first"])
    assert 3_990_000 < dropped <= 4_000_000
    assert before - resident_bytes(path) >= 0.9 * dropped
    assert torch.equal(mapped["first"], first) and torch.equal(mapped["second"], second)


def test_ordinary_memory_is_left_alone() -> None:
    """Mutant: advising without looking whether the memory belongs to a file, which would zero it."""
    ordinary = torch.ones(1000, 1000)
    assert drop_pages(ordinary) == 0
    assert drop_pages(torch.ones(3)) == 0
    assert ordinary.sum() == 1_000_000
