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
