"""Who a call is from: an API key names the tenant; without keys the request's own field is taken at its word.

The key file has one line for each key: ``TENANT KEY`` or ``TENANT sha256:HEX`` (of the key), so that it need not hold
the keys themselves. Empty lines and lines that begin with # are left out. A tenant may have several keys.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from scheduler_svc.api.door import MAX_TENANT
from scheduler_svc.api.refusal import UNAUTHENTICATED, Refusal, invalid
from scheduler_svc.reloaded import Reloaded

_SHA256 = re.compile(r"sha256:([0-9a-f]{64})")
MIN_KEY_CHARS = 16

Metadata = Iterable[tuple[str, str | bytes]]


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def parse_keys(text: str, name: str) -> dict[str, str]:
    """The lines of a key file -> tenants by digest. Raises ValueError, naming the line and never the key."""
    tenants: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = line.split()
        if len(fields) != 2 or len(fields[0]) > MAX_TENANT:
            raise ValueError(f"{name}, line {number}: must be TENANT KEY, the tenant of up to {MAX_TENANT} characters")
        tenant, key = fields
        match = _SHA256.fullmatch(key)
        if match is None and (key.startswith("sha256:") or len(key) < MIN_KEY_CHARS):
            raise ValueError(
                f"{name}, line {number}: a key has at least {MIN_KEY_CHARS} characters, a digest 64 of hex"
            )
        hashed = match[1] if match is not None else digest(key)
        if tenants.setdefault(hashed, tenant) != tenant:
            raise ValueError(f"{name}, line {number}: a key of two tenants")
    if not tenants:
        raise ValueError(f"{name}: it holds no key")
    return tenants


def load_keys(path: Path) -> dict[str, str]:
    """Raises ValueError, OSError among its causes."""
    try:
        return parse_keys(path.read_text(), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it is no text") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


def bearer(metadata: Metadata | None) -> str | None:
    """The key of ``authorization: Bearer KEY``."""
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str):
            scheme, _, credential = value.partition(" ")
            if scheme.lower() == "bearer":
                return credential.strip()
    return None


class Tenancy:
    """``keys``: tenants by the digest of their keys; None: no credential is asked for."""

    def __init__(self, keys: Reloaded[dict[str, str]] | None = None) -> None:
        self._file = keys

    def sweep(self) -> None:
        """Takes a key file that changed; to be called about once a second. Calls under way go on."""
        if self._file is not None:
            self._file.changed()

    def of(self, metadata: Metadata | None, named: str = "") -> str:
        """The tenant of a call whose request names ``named``. Raises Refusal."""
        if self._file is None:
            return named
        key = bearer(metadata)
        if key is None:
            raise Refusal(UNAUTHENTICATED, "an API key is needed: metadata `authorization: Bearer KEY`")
        # Found by its digest: how long that takes says nothing about the key.
        tenant = self._file.settings.get(digest(key))
        if tenant is None:
            raise Refusal(UNAUTHENTICATED, "the API key is not known here")
        if named and named != tenant:
            raise invalid("tenant", named, "empty, or the tenant of the API key")
        return tenant
