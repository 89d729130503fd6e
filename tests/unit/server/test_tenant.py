"""Keys to tenants, and salts that keep tenants apart whatever their users choose."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from longctx.server.tenant import Tenants, salt_for, tenant_of

texts = st.none() | st.text(max_size=12) | st.sampled_from(["-", "+0:", "+1:a", "org_1", "org_12345", "2345", ""])


@given(texts, texts, texts, texts)
def test_salts_are_the_same_exactly_for_the_same_tenant_and_salt(a: str, b: str, c: str, d: str) -> None:
    assert (salt_for(a, b) == salt_for(c, d)) == ((a, b) == (c, d))


def test_framing_is_unambiguous() -> None:
    """The textbook collision: a key glued to a salt reads as another key with another salt."""
    pairs = [("org_1", "2345"), ("org_12345", ""), ("org_12345", None), (None, "org_12345"), ("", "org_12345")]
    pairs += [("a+", "b"), ("a", "+b"), ("a-", ""), ("a", "-"), ("a", "+1:b"), ("a+1:b", None)]
    salts = [salt_for(*pair) for pair in pairs]
    assert len(set(salts)) == len(pairs)
    assert salt_for(None, None) is None


def test_only_known_keys_have_a_tenant() -> None:
    tenants = Tenants(["key-one-abc", "key-two-abc"])
    assert tenants.required and not Tenants([]).required
    names = [tenants.find(key) for key in ("key-one-abc", "key-two-abc")]
    assert len({*names}) == 2 and None not in names
    for wrong in ("", "key-one-ab", "key-one-abcd", "KEY-ONE-ABC", "é", "\udcff"):
        assert tenants.find(wrong) is None


def test_a_tenants_name_does_not_give_its_key_away() -> None:
    key = "sk-very-secret-key"
    assert not any(part in tenant_of(key) for part in ("secret", key, key[:6]))
    assert all(tenant_of(a) != tenant_of(b) for a, b in itertools.combinations([key, key + "x", key.upper()], 2))
