"""Digests of files, and manifests that have a digest themselves."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

CHUNK = 1 << 20


def digest_of(path: Path, size: int) -> str:
    """Return the digest of the first ``size`` bytes of a file; raises ``OSError`` if it cannot be read."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while size > 0 and (data := file.read(min(CHUNK, size))):
            digest.update(data)
            size -= len(data)
    return digest.hexdigest()


def with_checksum(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest of plain values with the digest of its content."""
    return {**manifest, "digest": _digest_of_content(manifest)}


def verified_content(content: Any) -> dict[str, Any]:
    """Return the manifest in the content of one with a checksum.

    Raises:
        ValueError, LookupError, AttributeError, TypeError, RecursionError: if the content is not what was written.
    """
    manifest = dict(content)
    if manifest.pop("digest") != _digest_of_content(manifest):
        raise ValueError("its text is not what was written")
    return manifest


def _digest_of_content(manifest: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())
