"""One way in which a Triton kernel can be launched, as data: what is compiled ahead of time, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import triton


@dataclass(frozen=True)
class KernelVariant:
    """A kernel with the constants of one launch.

    `signature` has every argument's type in the kernel's order ("*fp32", "i64", "constexpr"), `constants` the value of
    each constexpr. Pointers count as aligned to 16 bytes, as those of the launchers are; `divisible` names the integers
    that are known multiples of 16; `options` are the compiler's further ones, as the launcher passes them.
    """

    name: str
    fn: triton.JITFunction
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    divisible: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
