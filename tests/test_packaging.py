"""What is installed is what is in the checkout, and the checkout holds nothing that only one machine could use."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import longctx
import longctx.attention

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FOLDERS = ("longctx", *(folder for name, folder in SETUPTOOLS["package-dir"].items() if name != "longctx"))
NOT_PACKAGES = {"tests", "docs", "tools", "notebooks", "build", "dist"}
MAX_BLOB_BYTES = 500_000
MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(?:work|root|home|Users)/\w")

MARKDOWN_LINK = re.compile(r"\]\(([^)\s]+)\)")


def folders_with_init() -> set[str]:
    """Import names of every package folder of the checkout."""
    found = set()
    for init in ROOT.rglob("__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        if parts and parts[0] not in NOT_PACKAGES and not parts[0].startswith("."):
            found.add(".".join(parts if parts[0] == "longctx" else ("longctx", *parts)))
    return found


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_packages_lists_every_folder_with_an_init() -> None:
    """A folder left out is missing from the wheel without a warning, while an editable install still works."""
    assert set(SETUPTOOLS["packages"]) == folders_with_init()
    assert len(SETUPTOOLS["packages"]) == len(set(SETUPTOOLS["packages"]))


def test_package_dir_maps_every_top_level_folder() -> None:
    expected = {"longctx": "longctx"}
    for name in folders_with_init():
        folder = name.split(".")[1] if "." in name else ""
        if folder and not (ROOT / "longctx" / folder).is_dir():
            expected[f"longctx.{folder}"] = folder
    assert SETUPTOOLS["package-dir"] == expected


def test_every_module_lies_in_a_package() -> None:
    """A .py file in a folder without an __init__.py would be left out of the wheel."""
    orphans = [
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert orphans == []


def test_wheel_contains_every_module(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    # A copy: building in the checkout would pick up modules that an older build left in build/lib.
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", *command, str(source)], check=True)
    (wheel,) = tmp_path.glob("longctx_engine-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {"longctx/py.typed"}
    expected |= {f"longctx/server/static/{path.name}" for path in (ROOT / "longctx" / "server" / "static").iterdir()}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT).as_posix()
            expected.add(relative if folder == "longctx" else f"longctx/{relative}")
    assert packed == expected


def test_subpackages_come_from_this_checkout() -> None:
    """With another checkout installed editable, tests must still run the code beside them."""
    assert Path(longctx.__file__ or "").parent == ROOT / "longctx"
    assert Path(longctx.attention.__file__ or "").parent == ROOT / "attention"


def test_version_is_written_once_more_and_equal() -> None:
    assert longctx.__version__ == PYPROJECT["project"]["version"]


def test_constraints_pin_every_direct_dependency() -> None:
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = {re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0].lower() for requirement in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line and not line.startswith("#")}
    assert names - pinned == set()
    assert "torch==2.13.0" in lines


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path in (file for file in tracked_files() if file.suffix == ".md"):
        for target in MARKDOWN_LINK.findall(path.read_text()):
            if "://" not in target and not (path.parent / target.split("#")[0]).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken, "\n".join(broken)


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = set(MARKDOWN_LINK.findall((folder / "README.md").read_text()))
    assert listed == {path.name for path in folder.glob("[0-9]*.md")}


def test_no_large_blob_is_tracked() -> None:
    large = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked_files()}
    assert {name: size for name, size in large.items() if size > MAX_BLOB_BYTES} == {}


def test_no_tracked_file_names_a_machine_path() -> None:
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), start=1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)
