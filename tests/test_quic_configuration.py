"""Settings that contradict each other are refused where they are made, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from quic_pfec.cli.cert import make_certificate
from quic_pfec.quic.configuration import configuration
from quic_pfec.wire.errors import LocalError


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path / "one")
    _, other_key = make_certificate(tmp_path / "two")
    assert configuration(is_client=False, certificate=(str(certificate), str(key))).certificate is not None
    with pytest.raises(LocalError, match="does not belong to the certificate"):
        configuration(is_client=False, certificate=(str(certificate), str(other_key)))


@pytest.mark.parametrize("content", ["key", "text", "empty"])
def test_a_file_that_is_no_certificate_is_named(content: str, tmp_path: Path) -> None:
    cert, key = map(str, make_certificate(tmp_path / "good"))
    wrong = tmp_path / "wrong.pem"
    wrong.write_bytes({"key": Path(key).read_bytes(), "text": b"hello", "empty": b""}[content])
    expected = r"wrong\.pem holds no certificate in PEM.*BEGIN CERTIFICATE"
    with pytest.raises(LocalError, match=expected):
        configuration(is_client=True, ca_certs=str(wrong))
    with pytest.raises(LocalError, match=expected):
        configuration(is_client=False, certificate=(cert, key), client_ca=str(wrong))
    with pytest.raises(LocalError, match=expected):
        configuration(is_client=False, certificate=(str(wrong), key))
    if content != "key":
        with pytest.raises(LocalError, match=r"wrong\.pem is no private key"):
            configuration(is_client=False, certificate=(cert, str(wrong)))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    cert, key = map(str, make_certificate(tmp_path))
    nowhere = str(tmp_path / "none.pem")
    with pytest.raises(FileNotFoundError, match=r"none\.pem does not exist"):
        configuration(is_client=True, ca_certs=nowhere)
    with pytest.raises(FileNotFoundError, match=r"none\.pem does not exist"):
        configuration(is_client=False, certificate=(nowhere, key))
    with pytest.raises(OSError, match=r"none\.pem cannot be read"):
        configuration(is_client=False, certificate=(cert, nowhere))
    with pytest.raises(OSError, match="cannot be read: Is a directory"):
        configuration(is_client=True, ca_certs=str(tmp_path))
