"""Settings that contradict each other are refused where they are made, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from quic_pfec.cli.cert import make_certificate
from quic_pfec.quic.configuration import configuration, provisioned_rate
from quic_pfec.wire.errors import LocalError


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path / "one")
    _, other_key = make_certificate(tmp_path / "two")
    assert configuration(is_client=False, certificate=(str(certificate), str(key))).certificate is not None
    with pytest.raises(LocalError, match="does not belong to the certificate"):
        configuration(is_client=False, certificate=(str(certificate), str(other_key)))


def test_the_rate_and_the_controller_must_fit() -> None:
    assert provisioned_rate("cubic", None) is None
    assert provisioned_rate("cubic", "50Mbps") == 50e6
    assert provisioned_rate("rate", 2e7) == 2e7
    for controller, rate, reason in [
        ("rate", None, "needs rate="),
        ("reno", "1Mbps", "goes with"),
        ("bbr", None, "bbr"),
    ]:
        with pytest.raises(LocalError, match=reason):
            provisioned_rate(controller, rate)
