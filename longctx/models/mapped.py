"""Gives back the memory of weights that were read through a file mapping."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch


def drop_pages(tensor: torch.Tensor) -> int:
    """Let go of the resident pages of a memory-mapped tensor; returns the bytes given back, 0 where it is not mapped.

    The tensor stays valid, its pages are read from the file again when touched. It must not have been written to since
    it was mapped: a private mapping's changes would be lost. A mapping lives as long as any tensor of its file, so
    weights that were packed would stay resident beside their packed copy for as long as the embedding is in use.
    """
    if not hasattr(mmap, "MADV_DONTNEED") or not tensor.is_contiguous():
        return 0
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()
    # Whole pages inside the tensor only: its neighbours share the first and the last.
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length <= 0 or not _is_of_file(first, first + length):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_DONTNEED))
    return 0 if failed else length


def _is_of_file(begin: int, end: int) -> bool:
    """Whether these addresses lie in one mapping of a file on disk."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return False
    for line in maps.read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        low, high = (int(address, 16) for address in addresses.split("-"))
        if low <= begin and end <= high:
            return inode != "0"
    return False
