"""Options of a caller become a controller, or one line that says what does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from quic_pfec.quic.bbr import BbrController
from quic_pfec.quic.compat import ExtensionConnection
from quic_pfec.quic.congestion import Congestion, choose_congestion
from quic_pfec.wire.errors import LocalError

from .quic_pair import client_configuration


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, Congestion()),
        ({"congestion_control": "reno"}, Congestion("reno")),
        ({"rate": "50Mbps"}, Congestion("rate", rate_bps=50e6)),
        ({"congestion_control": "rate", "rate": 2e7}, Congestion("rate", rate_bps=2e7)),
        ({"congestion_control": "rate", "rate": 2e7, "lossy": True}, Congestion("rate", rate_bps=2e7)),
        ({"congestion_control": "bbr"}, Congestion("bbr", loss_threshold=0.02)),
        ({"congestion_control": "bbr", "lossy": True}, Congestion("bbr", loss_threshold=0.4)),
        ({"lossy": True}, Congestion("bbr", loss_threshold=0.4)),
    ],
)
def test_choices(options: dict[str, object], chosen: Congestion) -> None:
    assert choose_congestion(**options) == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"congestion_control": "rate"}, "needs rate="),
        ({"congestion_control": "reno", "rate": "1Mbps"}, "goes with"),
        ({"congestion_control": "bbr", "rate": "1Mbps"}, "goes with"),
        ({"congestion_control": "reno", "lossy": True}, "lossy"),
        ({"congestion_control": "vegas"}, "'bbr' or 'rate'"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(LocalError, match=reason):
        choose_congestion(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chosen", "name", "threshold", "own"),
    [
        (Congestion("cubic"), "cubic", None, False),
        (Congestion("rate", rate_bps=1e6), "rate", None, True),
        (Congestion("bbr", loss_threshold=0.1), "bbr", 0.1, True),
    ],
)
def test_a_connection_says_what_runs(chosen: Congestion, name: str, threshold: float | None, own: bool) -> None:
    quic = ExtensionConnection(configuration=client_configuration(congestion_control_algorithm=chosen.aioquic_name))
    chosen.install(quic, 1452)
    assert (quic.congestion_control, quic.loss_threshold, quic.has_own_pacer) == (name, threshold, own)


@pytest.mark.parametrize("threshold", [0.0, 1.0, -1.0])
def test_a_threshold_is_a_share(threshold: float) -> None:
    with pytest.raises(LocalError, match="share"):
        BbrController(loss_threshold=threshold)


@pytest.mark.parametrize("name", ["rate", "bbr"])
def test_the_burst_is_the_pacer_s_depth(name: str) -> None:
    quic = ExtensionConnection(configuration=client_configuration())
    Congestion(name, rate_bps=80e6 if name == "rate" else None, burst_s=0.004).install(quic, 1452)
    pacer: Any = quic._own_pacer
    pacer.next_send_time(1.0)
    pacer.next_send_time(1.1)  # idle for long: as full as it gets
    assert pacer._tokens == pytest.approx(max(0.004 * pacer.rate_bytes_per_s, 2 * pacer._packet))


@pytest.mark.parametrize("burst_s", [-0.001, 0.2, float("nan")])
def test_a_burst_is_a_short_time(burst_s: float) -> None:
    with pytest.raises(LocalError, match="burst_s"):
        Congestion("bbr", burst_s=burst_s)
