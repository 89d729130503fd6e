"""Compiles every Triton kernel ahead of time, for GPUs that need not be there: registers, shared memory and spills.

Exit code 0: every variant compiles without spills and fits its GPU; 1: one does not; 2: there is no triton.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ARCHS = (80, 90, 100)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that one program can have."""

FOLDERS = ("quant", "attention", "attention/kernels")


def main() -> int:
    options = _options()
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels are plain Python: there is nothing to compile
    # As on a GPU, where each launcher says what it needs; triton's own default is about to change, and it warns of it.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    sys.path.insert(0, str(ROOT))
    try:
        import triton
    except ModuleNotFoundError:
        print("kernels: there is no triton here, so nothing was compiled")
        return 2
    start_s = time.perf_counter()
    jobs = [job for arch in options.arch for job in list_jobs(arch, options.only)]
    print(f"kernels: {len(jobs)} variants for {_archs(options.arch)}, triton {triton.__version__}", flush=True)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        timed = list(pool.imap(compile_job, jobs, chunksize=2))
    rows = [row for row, _ in timed]
    print_table(rows)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "kernels.json").write_text(json.dumps(rows, indent=1) + "\n")
    bad = [row for row in rows if row["faults"]]
    for row in bad:
        print(f"  FAILED  {row['kernel']} sm_{row['arch']} {row['constants']}: {row['faults']}")
    seconds = f"{time.perf_counter() - start_s:.0f} s, {sum(cpu_s for _, cpu_s in timed):.0f} s of one core"
    print(f"kernels: {len(rows) - len(bad)} compiled, {len(bad)} failed, {seconds}")
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="*", default=list(ARCHS), choices=ARCHS)
    parser.add_argument("--only", default="", help="kernels and modules whose name contains this")
    parser.add_argument("--out", type=Path, help="folder for kernels.json")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    return parser.parse_args()


def kernel_modules() -> list[str]:
    """Every module of Triton kernels, by its file's name, so that none can be forgotten."""
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*_triton.py"))
    return [".".join(("longctx", *path.relative_to(ROOT).with_suffix("").parts)) for path in files]


def _load(name: str) -> ModuleType:
    __import__(name)
    return sys.modules[name]


def list_jobs(arch: int, only: str) -> list[tuple[str, int, int]]:
    """(module, arch, index in its `variants(arch)`) of all variants, those of one kernel beside each other."""
    jobs = []
    for name in kernel_modules():
        variants = getattr(_load(name), "variants", None)
        if variants is not None:
            jobs += [(name, arch, i) for i, v in enumerate(variants(arch)) if only in name or only in v.name]
    return jobs


def compile_job(job: tuple[str, int, int]) -> tuple[dict[str, Any], float]:
    """One variant's row of kernels.json and the seconds of a core it took."""
    before_s = _cpu_s()
    row = _row(*job)
    return row, _cpu_s() - before_s


def _cpu_s() -> float:
    """This process's seconds of a core, and those of the compilers it has started."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _row(module: str, arch: int, index: int) -> dict[str, Any]:
    """What kernels.json says of one variant; what went wrong stands in `faults`."""
    variant = _load(module).variants(arch)[index]
    row = {
        "kernel": variant.name,
        "arch": arch,
        "constants": {key: _plain(value) for key, value in variant.constants.items()},
        "types": [kind for kind in variant.signature.values() if kind != "constexpr"],
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
    }
    try:
        usage = measure(variant, arch)
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())[-400:]
        return row | {"registers": None, "shared_bytes": None, "spills": None, "faults": f"does not compile: {reason}"}
    faults = [f"{usage['spills']} bytes of spills"] if usage["spills"] else []
    if usage["shared_bytes"] > SHARED_LIMIT[arch]:
        faults.append(f"{usage['shared_bytes']} bytes of shared memory, the GPU has {SHARED_LIMIT[arch]}")
    return row | usage | {"faults": ", ".join(faults)}


def _plain(value: Any) -> Any:
    value = getattr(value, "value", value)  # a constexpr
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def measure(variant: Any, arch: int) -> dict[str, int]:
    """Registers and bytes of spills per thread, and bytes of shared memory per program, of a compiled variant.

    Whatever a thread keeps in local memory counts as spilled: kernels have no arrays that would belong there.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(variant.signature)
    aligned = [n for n in names if variant.signature[n].startswith("*") or n in variant.divisible]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(variant.fn, dict(variant.signature), dict(variant.constants), attrs)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages} | dict(variant.options)
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        command = [tools / "cuobjdump", "--dump-resource-usage", cubin]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {
        "registers": used["REG"],
        "shared_bytes": kernel.metadata.shared,
        "spills": used["STACK"] + used["LOCAL"],
    }


def print_table(rows: Iterable[dict[str, Any]]) -> None:
    """The worst of every kernel's variants, one line per kernel and GPU."""
    print(f"  {'kernel':34} {'gpu':>7} {'variants':>8} {'registers':>9} {'shared':>8} {'spills':>7}")
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kernel"], row["arch"]), []).append(row)
    for (kernel, arch), group in sorted(groups.items()):
        worst = [max(row[key] or 0 for row in group) for key in ("registers", "shared_bytes", "spills")]
        print(f"  {kernel:34} {f'sm_{arch}':>7} {len(group):8} {worst[0]:9} {worst[1]:8} {worst[2]:7}")


def _archs(archs: Iterable[int]) -> str:
    return ", ".join(f"sm_{arch}" for arch in archs)


if __name__ == "__main__":
    sys.exit(main())
