"""The house rules that a reviewer would otherwise have to watch: layers, seams, imports, the page of modules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = {"quant": 0, "offload": 0, "attention": 1, "parallel": 2, "longctx": 3, "evals": 4}
"""A folder imports from itself and from lower layers only."""

FORBIDDEN_INSIDE = {
    # The cache knows blocks and keys; who runs when, and on what model, is not its business.
    "longctx.kv": ("scheduler", "runner", "forward", "engine", "loop", "llm", "cli", "models"),
    # A model knows its own layers and calls a plan it is handed; it knows no cache and no requests.
    "longctx.models": ("kv", "scheduler", "runner", "forward", "engine", "loop", "llm", "cli", "request"),
    # The engine is driven by messages, from a program or from another process.
    "longctx.scheduler": ("runner", "forward", "engine", "loop", "llm", "cli"),
    "longctx.runner": ("scheduler", "engine", "loop", "llm", "cli", "kv.cache", "kv.index"),
    "longctx.forward": ("scheduler", "engine", "loop", "llm", "cli", "kv.cache", "kv.index"),
    "longctx.engine": ("loop", "llm", "cli"),
    # The HTTP side knows the engine by its messages; only the child process builds one.
    "longctx.server": ("scheduler", "runner", "forward", "llm", "cli"),
    "longctx": ("cli", "server"),
}
"""What parts of the engine must not import: prefix of the importer -> modules of `longctx`."""

ALLOWED_INSIDE = {("longctx.kv", "longctx.models.spec")}
"""Exceptions: a spec is plain data."""

PUBLIC_API = {
    "longctx",
    "longctx.config",
    "longctx.drift_note",
    "longctx.errors",
    "longctx.events",
    "longctx.llm",
    "longctx.machine",
    "longctx.models.spec",
    "longctx.params",
    "longctx.resident",
    "longctx.routing",
    "longctx.units",
}
"""What evals may import of the engine: what a user may."""

LAZY_IMPORTS = ("longctx/cli/", "longctx/__init__.py")
"""Where an import inside a function is right: the command line must answer `--help` without loading torch."""

GPU_ONLY = (
    "longctx.attention.triton_backend",
    "longctx.attention.flash_backend",
    "longctx.attention.kernels.merge_triton",
    "longctx.quant.store_triton",
)
"""What may be imported inside a function: it needs what a CPU's user need not have."""

LIGHT = (
    "longctx",
    "longctx.errors",
    "longctx.params",
    "longctx.events",
    "longctx.models.spec",
    "longctx.resident",
    "longctx.cli",
)
"""What must be importable without torch."""


@dataclass(frozen=True)
class Import:
    """One import statement's target: `module` as written, `line`, and where it stands."""

    module: str
    line: int
    in_function: bool
    for_types: bool


def source_files() -> list[Path]:
    return sorted(path for folder in LAYERS for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """The import name of a checkout's file: attention/state.py is longctx.attention.state."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts if parts[0] == "longctx" else ("longctx", *parts))


MODULES = {module_name(path): path for path in source_files()}


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Every import of a source text; `from a import b` yields a.b where that is a module, else a."""
    yield from _walk(ast.parse(source), package, in_function=False, for_types=False)


def _walk(node: ast.AST, package: str, in_function: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, in_function, for_types) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - child.level + 1], base]).rstrip(".")
            for alias in child.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in MODULES else base, child.lineno, in_function, for_types)
        else:
            deeper = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            types = for_types or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            yield from _walk(child, package, deeper, types)


def layer_folder(module: str) -> str:
    """The top-level folder of a longctx module."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "longctx"


def is_under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def violations(name: str, source: str, is_package: bool = False, where: str = "") -> list[str]:
    """The broken rules of one module's source, as lines for a person."""
    package = name if is_package else name.rpartition(".")[0]
    found = []
    for imp in imports_of(source, package):
        at = f"{where or name}:{imp.line}"
        root = imp.module.split(".")[0]
        if root in LAYERS and root != "longctx":
            found.append(f"{at}: `{imp.module}` must be imported as longctx.{imp.module}")
        if imp.in_function and not where.startswith(LAZY_IMPORTS) and imp.module not in GPU_ONLY:
            found.append(f"{at}: {imp.module} is imported inside a function; if that dodges a circle, cut the circle")
        if imp.module == "importlib" and not where.startswith(LAZY_IMPORTS):
            found.append(f"{at}: importlib hides an import from these checks")
        if root == "longctx":
            found += _seams(name, imp.module, at)
    return found


def _seams(name: str, target: str, at: str) -> Iterator[str]:
    mine, theirs = layer_folder(name), layer_folder(target)
    # The command line stands above everything, the suites included.
    on_top = is_under(name, "longctx.cli")
    if mine != theirs and LAYERS[theirs] >= LAYERS[mine] and not on_top:
        yield f"{at}: {mine}/ (layer {LAYERS[mine]}) imports {target} (layer {LAYERS[theirs]})"
    if mine == "evals" and theirs == "longctx" and target not in PUBLIC_API:
        yield f"{at}: evals use the public API only, not {target}"
    if mine != "longctx" or theirs != "longctx" or on_top:
        return
    for importer, forbidden in FORBIDDEN_INSIDE.items():
        if not is_under(name, importer) or any(is_under(name, a) and is_under(target, b) for a, b in ALLOWED_INSIDE):
            continue
        hits = [f for f in forbidden if is_under(target, f"longctx.{f}") and not is_under(name, f"longctx.{f}")]
        if hits:
            yield f"{at}: {importer} must not import {target}"


def test_every_folder_imports_only_what_its_layer_may() -> None:
    found = []
    for name, path in MODULES.items():
        where = str(path.relative_to(ROOT))
        found += violations(name, path.read_text(), path.name == "__init__.py", where)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("longctx.quant.store", "from longctx.attention.state import AttnState"),
        ("longctx.quant.store", "from longctx.offload import key"),
        ("longctx.attention.attend", "import longctx.parallel.group"),
        ("longctx.attention.attend", "import longctx.kv.groups"),
        ("longctx.attention.attend", "from quant.layout import LayerKV"),
        ("longctx.attention.attend", "import attention"),
        ("longctx.attention.attend", "from ..kv import groups"),
        ("longctx.kv.pool", "from longctx.scheduler import Scheduler"),
        ("longctx.kv.pool", "from longctx.models.load import load_model"),
        ("longctx.models.hook", "from longctx.kv.cache import KVCache"),
        ("longctx.models.hook", "from longctx.kv import groups"),
        ("longctx.engine", "from longctx.cli import app"),
        ("longctx.engine", "import longctx.evals.needle_model"),
        ("longctx.runner", "from longctx.kv.cache import KVCache"),
        ("longctx.evals.needle", "from longctx.engine import Engine"),
        ("longctx.engine", "def f():\n    import json"),
        ("longctx.engine", "class A:\n    def f(self):\n        from longctx import errors"),
        ("longctx.engine", "import importlib"),
    ],
)
def test_a_broken_rule_is_seen(name: str, source: str) -> None:
    """The checker's own mutants: each of these lines must be refused."""
    assert violations(name, source)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("longctx.kv.pool", "from longctx.models.spec import ModelSpec"),
        ("longctx.kv.cache", "from longctx.kv.pool import SlotPool\nfrom longctx.offload import key"),
        ("longctx.models.hook", "import torch\nfrom longctx.attention.state import AttnState"),
        ("longctx.cli.bench", "from longctx.evals import needle_model\nfrom longctx.engine import Engine"),
        ("longctx.evals.needle", "from longctx import LLM\nfrom longctx.evals import tasks"),
    ],
)
def test_a_right_import_is_allowed(name: str, source: str) -> None:
    assert violations(name, source) == []


def test_modules_import_each_other_without_circles() -> None:
    graph = {
        name: {
            imp.module
            for imp in imports_of(path.read_text(), name if path.name == "__init__.py" else name.rpartition(".")[0])
            if imp.module in MODULES and not imp.for_types and not imp.in_function and imp.module != name
        }
        for name, path in MODULES.items()
    }
    # Kahn's algorithm: what is left after peeling off modules without imports is a circle or depends on one.
    while ready := {name for name, needs in graph.items() if not needs}:
        graph = {name: needs - ready for name, needs in graph.items() if name not in ready}
    assert not graph, f"a circle of imports through: {', '.join(sorted(graph))}"


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_do_not_load_torch(name: str) -> None:
    """`longctx --help` must answer at once, so nothing on its way may import torch or transformers."""
    if name not in MODULES:
        pytest.skip(f"{name} does not exist")
    code = f"import sys, {name}; print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["longctx.server.listen", "longctx.server.prepare_worker"])
def test_what_only_reads_text_needs_no_torch(name: str) -> None:
    code = (
        f"from longctx.server.without_torch import keep_torch_out; keep_torch_out(); import sys, {name}; "
        "print([m for m in ('numba', 'psutil') if m in sys.modules], sys.modules['torch'])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (result.stdout.strip(), result.stderr) == ("[] None", "")


def test_structures_page_names_every_module() -> None:
    page = (ROOT / "docs" / "structures.md").read_text()
    missing = [
        path
        for file in source_files()
        if file.name != "__init__.py" and f"`{(path := str(file.relative_to(ROOT)))}`" not in page
    ]
    assert not missing, f"docs/structures.md has no line for: {', '.join(missing)}"


def test_structures_page_names_no_module_that_is_gone() -> None:
    page = (ROOT / "docs" / "structures.md").read_text()
    named = re.findall(r"^- `([\w/]+\.py)`", page, re.MULTILINE)
    assert len(named) == len(set(named))
    assert [path for path in named if not (ROOT / path).is_file()] == []
