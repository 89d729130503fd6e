"""Compiles the Triton kernels, then checks and measures what runs on a CUDA device: a checkout is all that it needs.

Without a device the kernels are compiled for three of them and tried in Triton's interpreter; nothing is measured then.
Needs torch, triton, transformers, numba, numpy, safetensors, accelerate and psutil (with what they bring); no web
framework, no gguf, no typer, no pytest, no network, no installation. Exit code 0: all passed, 1: something failed, 2:
something that it needs is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("torch", "triton", "transformers", "numba", "numpy", "safetensors", "accelerate", "psutil")
GIB = 1 << 30

Check = tuple[str, Callable[[], object]]


def main() -> int:
    options = _options()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"gpu-check: missing {', '.join(missing)}; it needs torch >= 2.11, triton >= 3.6, transformers >= 5.17")
        return 2
    import torch

    device = "cpu" if options.device == "cpu" or not torch.cuda.is_available() else "cuda"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported, which it is with what comes now
    _use_checkout()
    start_s = time.perf_counter()
    print(f"gpu-check: {_device_line(torch, device)}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = [_compiles(options)]
    checks = list(_checks(device, everything=device == "cuda" or options.device == "cpu"))
    outcomes += [_passes(name, check) for name, check in checks]
    figures: dict[str, Any] = {}
    if device == "cuda" or options.device == "cpu":
        figures = _figures(device)
        _print_figures(figures)
    report = {"device": _device_line(torch, device), "torch": torch.__version__, **figures}
    (options.out / "gpu-check.json").write_text(json.dumps(report, indent=1) + "\n")
    if device == "cpu":
        print(
            "gpu-check: there is no CUDA device here: NOTHING RAN ON A GPU, and nothing of a GPU's speed was measured;"
        )
        print("           the kernels were compiled ahead of time and tried in Triton's interpreter")
    failed = outcomes.count(False)
    print(f"gpu-check: took {time.perf_counter() - start_s:.0f} s")
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT, help="folder for kernels.json and gpu-check.json")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu"), help="cpu tries the checks themselves")
    parser.add_argument("--kernels", default="", help="compile only kernels whose name contains this")
    return parser.parse_args()


def _use_checkout() -> None:
    """Import longctx and the tests' helpers from this checkout, whatever else is installed under those names."""
    sys.path.insert(0, str(ROOT))
    # A folder without __init__.py loses to any installed package called "tests", and some wheels bring one.
    tests = types.ModuleType("tests")
    tests.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = tests


def _compiles(options: argparse.Namespace) -> bool:
    """Ahead of time, in processes of its own: interpreted kernels cannot be compiled."""
    command = [sys.executable, str(ROOT / "tools" / "compile_kernels.py"), "--out", str(options.out)]
    command += ["--jobs", str(max(2, min(16, os.cpu_count() or 2))), "--only", options.kernels]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, env=environment).returncode == 0


def _checks(device: str, *, everything: bool) -> Iterator[Check]:
    """Names and checks; without `everything` those of the kernels alone, which the interpreter needs a minute for."""
    from longctx.quant.formats import FORMATS
    from tests.helpers import gpu_checks as checks

    for fmt in FORMATS:
        yield f"storage, {fmt}", lambda fmt=fmt: checks.check_storage(fmt, device)
    yield "merge of states", lambda: checks.check_merge(device)
    interpreted = [("triton", case) for case in checks.INTERPRETER_CASES] if device == "cpu" else []
    backends = [name for name in checks.gpu_backends(device) if not (interpreted and name == "triton")]
    every = [(name, case) for name in backends for case in checks.ATTENTION_CASES] if everything else []
    for name, case in interpreted + every:
        yield f"attention by {name}, {case}", lambda n=name, c=case: checks.check_attention(c, n, device)
    if not everything:
        return
    for name in backends:
        for kind in checks.ENGINE_KINDS:
            yield f"engine by {name}, {kind}", lambda n=name, k=kind: checks.check_engine(k, n, device)
        for kind, fmt in checks.LOSSY_ENGINES:
            label = f"engine by {name}, {kind}, {fmt}"
            yield label, lambda n=name, k=kind, f=fmt: checks.check_lossy_engine(k, f, n, device)


def _passes(name: str, check: Callable[[], object]) -> bool:
    before_s = time.perf_counter()
    try:
        check()
    except Exception:
        traceback.print_exc()
        print(f"  FAILED  {name}", flush=True)
        return False
    print(f"  ok {time.perf_counter() - before_s:6.1f} s  {name}", flush=True)
    return True


def _figures(device: str) -> dict[str, Any]:
    """Decode and prefill at the shape of an 8B model's layer, beside the device's limits; small on a CPU."""
    from tests.helpers import gpu_checks, gpu_speed

    small = device == "cpu"
    limits = gpu_speed.limits(device, copy_bytes=GIB // 16 if small else 2 * GIB, matmul=256 if small else 8192)
    backends = ["torch"] if small else gpu_checks.gpu_backends(device)
    rows = []
    for history in (1024,) if small else (32768, 131072):
        chunk = 128 if small else 2048
        for name in backends:
            # Torch's own attention gathers the keys first: one row of it, for comparison.
            for fmt in ("bf16", "fp8_e4m3", "int8", "int4") if name == "triton" else ("bf16",):
                rows.append(gpu_speed.decode_speed(fmt, history, name, device, 1 if small else GIB))
                rows.append(gpu_speed.prefill_speed(fmt, history, chunk, name, device))
        rows.append(gpu_speed.torch_prefill_speed(history, chunk, device))
        rows.append(gpu_speed.flash_prefill_speed(history, chunk, device))
    shape = f"one layer, {gpu_speed.HEADS} query and {gpu_speed.KV_HEADS} kv heads of {gpu_speed.DIM}, bf16 queries"
    return {"limits": limits, "shape": shape, "rows": [row for row in rows if row is not None]}


def _print_figures(figures: dict[str, Any]) -> None:
    copy, matmul = figures["limits"]["copy_bytes_per_s"], figures["limits"]["matmul_flops_per_s"]
    print(f"  {figures['shape']}; a copy moves {copy / 1e9:.0f} GB/s, a bf16 product {matmul / 1e12:.2f} TFLOP/s")
    for row in figures["rows"]:
        name = f"{row['work']:8}{row['backend']:26}{row['format']:9}{row['history']:>8,}"
        if row["work"] == "decode":
            how = "as a CUDA graph" if row["graph"] else "launched one by one"
            share = row["bytes_per_s"] / copy
            print(f"    {name}  {row['bytes_per_s'] / 1e9:9.1f} GB/s of KV, {share:6.1%} of the copy, {how}")
        else:
            share = row["flops_per_s"] / matmul
            print(f"    {name}  {row['flops_per_s'] / 1e12:9.2f} TFLOP/s, {share:6.1%} of the product")


def _device_line(torch: Any, device: str) -> str:
    if device == "cpu":
        return f"no CUDA device, torch {torch.__version__}"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, sm_{major}{minor}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
