"""Checks and measures everything that runs on a CUDA device, from the checkout's root and without installation.

Needs torch, triton, transformers, numba, numpy and safetensors (with what they bring); no web framework, no gguf, no
typer, no pytest and no network. Exit code 0: all passed, 1: something failed, 2: there is nothing to check it on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30


def main() -> int:
    options = _options()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _use_checkout()
    start_s = time.perf_counter()
    try:
        import torch

        from tests.helpers import gpu_checks as checks
    except ModuleNotFoundError as error:
        print(f"gpu-check: {error}; it needs torch >= 2.11, triton >= 3.6, transformers >= 5.17 and numba")
        return 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: there is no CUDA device here, so nothing was checked")
        return 2
    print(f"gpu-check: {_device_line(torch, options.device)}", flush=True)

    outcomes = [
        _passes(f"attention, {case}", checks.check_attention, case, options.device) for case in checks.ATTENTION_CASES
    ]
    outcomes += [_passes(f"engine, {kind}", checks.check_engine, kind, options.device) for kind in checks.ENGINE_KINDS]
    small = options.device == "cpu"
    figures = checks.measure(
        options.device,
        history=4096 if small else 32768,
        chunk=512 if small else 2048,
        copy_bytes=GIB // 8 if small else GIB,
    )
    _print_figures(figures)
    _write(options.out, torch, options.device, figures)
    failed = outcomes.count(False)
    print(f"gpu-check: took {time.perf_counter() - start_s:.0f} s")
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT, help="folder for kernels.json and gpu-check.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the checks themselves")
    return parser.parse_args()


def _use_checkout() -> None:
    """Import longctx and the tests' helpers from this checkout, whatever else is installed under those names."""
    sys.path.insert(0, str(ROOT))
    # A folder without __init__.py loses to any installed package called "tests", and some wheels bring one.
    tests = types.ModuleType("tests")
    tests.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = tests


def _passes(name: str, check: Callable[[Any, str], None], case: Any, device: str) -> bool:
    before_s = time.perf_counter()
    try:
        check(case, device)
    except Exception:
        traceback.print_exc()
        print(f"  FAILED  {name}", flush=True)
        return False
    print(f"  ok {time.perf_counter() - before_s:6.1f} s  {name}", flush=True)
    return True


def _print_figures(figures: dict[str, Any]) -> None:
    print(f"  torch backend, {figures['shape']}, {figures['history']:,} tokens of history:")
    print(f"    prefill of {figures['chunk']:,}: {figures['prefill_flops_per_s'] / 1e12:.2f} TFLOP/s")
    print(
        f"    decode: {figures['decode_bytes_per_s'] / 1e9:.1f} GB/s of KV, {figures['share_of_copy']:.1%} of a copy's "
        f"{figures['copy_bytes_per_s'] / 1e9:.0f} GB/s"
    )


def _write(out: Path, torch: Any, device: str, figures: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    report = {"device": _device_line(torch, device), "torch": torch.__version__, "attention": figures}
    (out / "gpu-check.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "kernels.json").write_text("[]\n")
    print("  kernels.json is an empty list: attention on a GPU is torch's own so far, there are no kernels to report")


def _device_line(torch: Any, device: str) -> str:
    if device == "cpu":
        return f"the CPU, to try the checks themselves, torch {torch.__version__}"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, sm_{major}{minor}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
