"""Runs mypy on the package as it is imported, although the checkout lies differently.

`attention/` is imported as `longctx.attention`, which no type checker can know. A tree of symlinks under build/types
has the shape of the installed package; mypy runs there, and its paths are mapped back to the checkout's.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "types"


def main() -> int:
    mapping = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    siblings = {name.split(".", 1)[1]: folder for name, folder in mapping.items() if "." in name}
    build_tree(siblings)
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "longctx"],
        cwd=TREE,
        stdout=subprocess.PIPE,
        text=True,
    )
    prefix = re.compile(rf"^longctx/(?=({'|'.join(siblings)})/)", re.MULTILINE)
    print(prefix.sub("", result.stdout), end="")
    return result.returncode


def build_tree(siblings: dict[str, str]) -> None:
    """Lay out build/types/longctx: the entries of longctx/ and the sibling folders, each a symlink."""
    shutil.rmtree(TREE, ignore_errors=True)
    package = TREE / "longctx"
    package.mkdir(parents=True)
    for entry in (ROOT / "longctx").iterdir():
        if entry.is_dir() or entry.suffix in (".py", ".typed"):
            (package / entry.name).symlink_to(entry)
    for name, folder in siblings.items():
        (package / name).symlink_to(ROOT / folder)


if __name__ == "__main__":
    sys.exit(main())
