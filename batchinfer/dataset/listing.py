"""Paths, folders and globs become a list of input files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchinfer.dataset.filesystem import FileStat, Location
from batchinfer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchinfer.dataset.roots import Roots

_FORMATS = {".parquet": "parquet", ".parq": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_MAGIC = re.compile(r"[*?\[]")
JOB_MARKER = "_job.json"
"""File that marks an output folder of batchinfer; such folders inside an input folder are not read as input."""

INPUT_MISSING = "input_missing"
"""Code of an input that is not there (yet); other errors say that it cannot be read."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file to read, and how: ``format`` is ``parquet`` or ``jsonl``."""

    location: Location
    format: str
    stat: FileStat


@dataclass(frozen=True, slots=True)
class Listing:
    """Files in reading order, and sentences for people about what was left out."""

    files: list[FoundFile]
    warnings: list[str]


def find_files(inputs: Sequence[str], roots: Roots | None = None) -> Listing:
    """Expand inputs: each in the order given, the files of a folder or glob sorted by path, none twice.

    Folders are read at any depth; names that begin with ``_`` or ``.`` are hidden, as for every Parquet reader.

    Raises:
        InputError: an input that does not exist, matches nothing, or is neither Parquet nor JSONL; a mixture of both;
            a file outside of ``roots``.
    """
    listing = Listing([], [])
    for uri in inputs:
        if roots is not None:
            roots.check_input(uri)
        num_before = len(listing.files)
        _add(listing, uri)
        if roots is not None:
            for found in listing.files[num_before:]:
                roots.check_input(found.location.uri)
    unique = {found.location.uri: found for found in listing.files}
    if len(unique) < len(listing.files):
        listing.warnings.append("Some input files were named more than once; each is read once.")
    files = list(unique.values())
    if len({found.format for found in files}) > 1:
        raise InputError("the inputs mix Parquet and JSONL files; submit them as two jobs", param="inputs")
    return Listing(files, listing.warnings)


def _add(listing: Listing, uri: str) -> None:
    base, pattern = _split_glob(uri)
    location = Location.parse(base if pattern else uri)
    try:
        kind = location.kind()
        if kind == "file" and not pattern:
            listing.files.append(FoundFile(location, _format_of_file(location), location.stat()))
            return
        if kind is None:
            raise InputError(f"input {uri!r} does not exist", param="inputs", code=INPUT_MISSING)
        found, others = _walk(location, pattern)
    except OSError as error:
        raise InputError(f"cannot list input {uri!r}: {error}", param="inputs") from None
    if not found:
        raise InputError(f"input {uri!r} has no .parquet or .jsonl file", param="inputs", code=INPUT_MISSING)
    if others:
        listing.warnings.append(f"{others} file(s) of {uri} are neither .parquet nor .jsonl and are not read.")
    if any("=" in part for part in found[0].location.path[len(location.path) :].split("/")[:-1]):
        listing.warnings.append(f"{uri} looks Hive-partitioned; values in folder names do not become columns.")
    listing.files.extend(found)


def _split_glob(uri: str) -> tuple[str, str]:
    """Cut before the first component with a wildcard. A name that exists as it stands is no pattern."""
    match = _MAGIC.search(uri)
    if match is None or Location.parse(uri).kind() is not None:
        return uri, ""
    cut = uri.rfind("/", 0, match.start())
    return (uri[:cut] or "/", uri[cut + 1 :]) if cut >= 0 else (".", uri)


def _walk(folder: Location, pattern: str) -> tuple[list[FoundFile], int]:
    """Files below a folder that match, sorted by path, and how many had another format."""
    entries = [(where.path[len(folder.path.rstrip("/")) + 1 :], where, stat) for where, stat in folder.walk()]
    outputs = tuple(tail.removesuffix(JOB_MARKER) for tail, _, _ in entries if tail.endswith("/" + JOB_MARKER))
    matches = _glob_regex(pattern).fullmatch if pattern else None
    found, others = [], 0
    for tail, where, stat in sorted(entries, key=lambda entry: entry[0]):
        hidden = any(part.startswith(("_", ".")) for part in tail.split("/"))
        if hidden or (matches and not matches(tail)) or (outputs and tail.startswith(outputs)):
            continue
        file_format = _format_of_name(where.name)
        if file_format is None:
            others += 1
        else:
            found.append(FoundFile(where, file_format, stat))
    return found, others


def _glob_regex(pattern: str) -> re.Pattern[str]:
    """``*``, ``?`` and ``[...]`` stay within one name; ``**/`` is any depth."""
    return re.compile("".join(_glob_pieces(pattern)))


def _glob_pieces(pattern: str) -> Iterator[str]:
    for piece in re.findall(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", pattern, re.DOTALL):
        if piece == "**/":
            yield "(?:.*/)?"
        elif piece in ("**", "*", "?"):
            yield {"**": ".*", "*": "[^/]*", "?": "[^/]"}[piece]
        elif piece.startswith("[") and len(piece) > 1:
            body = piece[1:-1].replace("\\", "\\\\")
            yield f"[^{body[1:]}]" if body.startswith("!") else f"[{body}]"
        else:
            yield re.escape(piece)


def _format_of_name(name: str) -> str | None:
    return next((fmt for suffix, fmt in _FORMATS.items() if name.lower().endswith(suffix)), None)


def _format_of_file(location: Location) -> str:
    """By name, else by the first bytes: a file that somebody names is worth a look."""
    by_name = _format_of_name(location.name)
    if by_name:
        return by_name
    with location.open_input() as stream:
        head = stream.read(64)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return "jsonl"
    raise InputError(f"input {location.uri!r} is neither Parquet nor JSONL", param="inputs")
