"""Who asks: an API key's tenant, and the cache salt that keeps tenants apart."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence


class Tenants:
    """The API keys that are let in. Without any, everybody is, as the one tenant None."""

    def __init__(self, keys: Sequence[str]):
        self._digests = [(_digest(key), tenant_of(key)) for key in keys]

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def find(self, key: str) -> str | None:
        """The tenant of a key, or None for an unknown one.

        Digests are compared, all of them and each in constant time: how long it takes says nothing about a key.
        """
        given, found = _digest(key), None
        for digest, tenant in self._digests:
            if hmac.compare_digest(given, digest):
                found = tenant
        return found


def tenant_of(key: str) -> str:
    """A name for the holder of a key that does not give the key away."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"longctx-tenant").hexdigest()


def salt_for(tenant: str | None, user_salt: str | None) -> str | None:
    """The cache salt of a request: the same only for the same tenant and the same salt of its own.

    Both parts are framed by their lengths, so ("org_1", "2345") and ("org_12345", "") differ; None differs from "".
    """
    if tenant is None and user_salt is None:
        return None
    digest = hashlib.blake2b(digest_size=16, person=b"longctx-salt")
    for part in (tenant, user_salt):
        data = b"" if part is None else part.encode("utf-8", "surrogatepass")
        digest.update(b"-" if part is None else b"+%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32).digest()
