"""The manifest of a finished run's files: their sizes and digests at its end, and what has changed since."""

import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..durable_files import path_exists, read_json, translated_disk_errors, write_json
from ..errors import UsageError, warn
from ..file_digests import digest_of, verified_content, with_checksum

FILES = "files.json"
RECORDS = (".jsonl", ".csv")
"""Endings of the files that a run only appends to."""
SETTINGS = (".json",)
READ = (*SETTINGS, *RECORDS)
"""Endings of the files behind what the reading commands show."""
ALL = (*READ, ".pt")
"""Endings of all files of a run."""


class Change(NamedTuple):
    """What has happened to a file of a finished run since its end."""

    sentence: str
    is_damage: bool = True
    """Whether the content of the run has changed; otherwise rows were appended to it."""


def write_manifest(folder: Path, files: Iterable[Path]) -> None:
    """Write sizes, times and digests of the files that exist; 1 GB takes about a second.

    Raises:
        LoopscopeError: if the file system refuses the write.
    """
    with translated_disk_errors(folder / FILES):  # too many open files
        entries = {path.name: _entry(path) for path in files if path.is_file()}
    write_json(folder / FILES, with_checksum({"format": 1, "files": entries}))


def _entry(path: Path) -> dict[str, Any]:
    status = path.stat()
    digest = digest_of(path, status.st_size)
    return {"bytes": status.st_size, "modified": status.st_mtime_ns, "xxh3_128": digest}


def changed_files(folder: Path, read: Collection[str]) -> dict[str, Change]:
    """Return what has happened to the files of a finished run since its end, by their names.

    A file whose size and time of modification are unchanged is only read if its name has one of the endings ``read``,
    those of the files that the caller reads anyway. A run without a manifest, such as a killed one, has no result.
    """
    path = folder / FILES
    remedy = "the files of the run cannot be checked: restore it from a copy, or remove it."
    try:
        if not path_exists(path):
            return {}
        files = verified_content(read_json(path))["files"]
        changes = {name: _change(folder / name, entry, read) for name, entry in files.items()}
    except UsageError as error:
        return {FILES: Change(f"{str(error).rstrip('.')}; {remedy}")}
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return {FILES: Change(f"{path} is damaged: its text is not what the run wrote; {remedy}")}
    return {name: change for name, change in changes.items() if change is not None}


def _change(path: Path, entry: Mapping[str, Any], read: Collection[str]) -> Change | None:
    """Return what has happened to a file, or ``None`` if nothing has."""
    size, is_record, is_weights = entry["bytes"], path.suffix in RECORDS, path.suffix == ".pt"
    content = "rows of the run are" if is_record else "content of the run is"
    remedy = "remove it and resume the run, which writes it again" if is_weights else "train the run again"
    restore = f"restore it from a copy, or {remedy}"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return Change(f"{path} is damaged: it is not a regular file; {restore}.")
        if status.st_size < size:
            count = f"{status.st_size:,} of {size:,} bytes"
            return Change(f"{path} is damaged: it has {count}, so {content} lost; {restore}.")
        is_same = (status.st_size, status.st_mtime_ns) == (size, entry["modified"])
        if is_same and path.suffix not in read:
            return None
        if (status.st_size > size and not is_record) or digest_of(path, size) != entry["xxh3_128"]:
            problem = "its bytes are not those of the finished run, so what it shows may be wrong"
            return Change(f"{path} is damaged: {problem}; {restore}.")
    except FileNotFoundError:
        if is_weights:  # removed to save space, which is no silent damage
            return None
        return Change(f"{path} is missing, so the {content} lost; {restore}.")
    except OSError as error:
        return Change(f"{path} cannot be read: {error.strerror}; {restore}.")
    if extra := status.st_size - size:
        sentence = f"{path} was extended: the {extra:,} bytes after those of the run are not its own."
        return Change(sentence, is_damage=False)
    return None


def changes_text(folder: Path, read: Collection[str]) -> str:
    """Return the sentences of :func:`changed_files` in one text."""
    return " ".join(change.sentence for change in changed_files(folder, read).values())


def warn_of_changes(folder: Path, read: Collection[str] = READ) -> None:
    """Warn of each file of a finished run that has changed since its end."""
    for change in changed_files(folder, read).values():
        warn(change.sentence, stacklevel=2)


def refuse_damage(folder: Path, read: Collection[str] = ALL, name: str | None = None) -> None:
    """Raise :class:`UsageError` if files of a finished run, or the file of this name, are damaged."""
    changes = changed_files(folder, read).items()
    sentences = [change.sentence for key, change in changes if change.is_damage and name in (None, key)]
    if sentences:
        raise UsageError(" ".join(sentences))
