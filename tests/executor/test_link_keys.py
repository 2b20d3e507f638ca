"""The derivation of the link's CURVE keys is part of the protocol: pinned by value."""

from pathlib import Path

import pytest
import zmq

from protos.link_keys import derive, read_secret


def test_pairs_are_valid_distinct_and_repeatable() -> None:
    keys = derive(b"0123456789abcdef")
    assert derive(b"0123456789abcdef") == keys
    assert len({keys.server_public, keys.server_secret, keys.client_public, keys.client_secret}) == 4
    assert zmq.curve_public(keys.server_secret) == keys.server_public
    assert zmq.curve_public(keys.client_secret) == keys.client_public
    assert derive(b"0123456789abcdeg").server_public != keys.server_public


def test_derivation_never_changes() -> None:
    keys = derive(b"a shared secret of the link")
    assert keys.server_public == b"nrQ0a+*/z>w]GhL&H4]yfKM<25WkdydgM%*)PoI@"
    assert keys.client_public == b"?w:v}yPmn{7mZB{1zdFA:Y{d}+)U2:Sv$?T=V@y$"


def test_secrets_stay_out_of_repr() -> None:
    keys = derive(b"0123456789abcdef")
    assert keys.client_secret.decode() not in repr(keys)
    assert keys.server_secret.decode() not in repr(keys)


@pytest.mark.parametrize("secret", [b"", b"short", b"x" * 5000])
def test_bad_secrets_are_refused(secret: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="16 to 4096 bytes"):
        derive(secret)
    (tmp_path / "secret").write_bytes(secret)
    with pytest.raises(ValueError, match="16 to 4096 bytes"):
        read_secret(tmp_path / "secret")


def test_a_trailing_line_break_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"0123456789abcdef\n")
    assert read_secret(tmp_path / "secret") == b"0123456789abcdef"
