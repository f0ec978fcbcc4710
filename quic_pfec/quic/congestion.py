"""The choice of a congestion controller, from plain options to a controller in a connection.

`cubic` and `reno` are aioquic's and back off at every loss, which is right on an unknown path. `bbr` and `rate` are
ours and bring their own pacer; the caller chooses them.
"""

from __future__ import annotations

from dataclasses import dataclass

from quic_pfec.quantities import parse_rate
from quic_pfec.quic.bbr import DRAFT_LOSS_THRESHOLD, LOSSY_LOSS_THRESHOLD, bbr_control
from quic_pfec.quic.compat import ExtensionConnection
from quic_pfec.quic.rate import rate_control
from quic_pfec.wire.errors import LocalError

__all__ = ["CONTROLLERS", "DEFAULT_BURST_S", "Congestion", "choose_congestion"]

DEFAULT_BURST_S = 0.001
"""Nine packets at 100 Mbit/s."""
MAX_BURST_S = 0.1

CONTROLLERS = ("cubic", "reno", "bbr", "rate")


@dataclass(frozen=True, slots=True)
class Congestion:
    """name: one of CONTROLLERS. rate_bps: of `rate`, else None. loss_threshold: of `bbr`, else None.

    burst_s: how much of the rate `rate` and `bbr` may send at once, in seconds of it, and so how often they are woken:
    larger costs less CPU time and more queue. At least two packets, and on a loop that has no timer below a millisecond
    one that is smaller comes to that.
    """

    name: str = "cubic"
    rate_bps: float | None = None
    loss_threshold: float | None = None
    burst_s: float = DEFAULT_BURST_S

    def __post_init__(self) -> None:
        if not 0 <= self.burst_s <= MAX_BURST_S:
            raise LocalError(f"burst_s must be 0 to {MAX_BURST_S:g} s, not {self.burst_s!r}")

    @property
    def aioquic_name(self) -> str:
        """The controller that aioquic constructs; one of ours takes its place before the first packet."""
        return self.name if self.name in ("cubic", "reno") else "reno"

    def install(self, quic: ExtensionConnection, max_datagram_size: int) -> None:
        """Gives a fresh connection this controller; does nothing for one that aioquic has."""
        if self.name == "rate":
            assert self.rate_bps is not None
            quic.set_congestion_control(
                *rate_control(self.rate_bps, max_datagram_size=max_datagram_size, burst_s=self.burst_s)
            )
        elif self.name == "bbr":
            quic.set_congestion_control(
                *bbr_control(
                    loss_threshold=self.loss_threshold, max_datagram_size=max_datagram_size, burst_s=self.burst_s
                )
            )


def choose_congestion(
    congestion_control: str = "cubic", rate: str | float | None = None, lossy: bool = False
) -> Congestion:
    """What the options of `connect` and `serve` mean. `rate` alone implies "rate", `lossy` alone "bbr".

    Raises `LocalError` for options that do not fit together.
    """
    if congestion_control not in CONTROLLERS:
        raise LocalError(f"congestion_control must be 'cubic', 'reno', 'bbr' or 'rate', not {congestion_control!r}")
    if rate is not None:
        if congestion_control not in ("rate", "cubic"):
            raise LocalError(f"rate= goes with congestion_control='rate', not {congestion_control!r}")
        return Congestion("rate", rate_bps=parse_rate(rate))
    if congestion_control == "rate":
        raise LocalError("congestion_control='rate' needs rate=, for example rate='50Mbps'")
    if congestion_control == "bbr" or (lossy and congestion_control == "cubic"):
        return Congestion("bbr", loss_threshold=LOSSY_LOSS_THRESHOLD if lossy else DRAFT_LOSS_THRESHOLD)
    if lossy:
        raise LocalError(f"lossy goes with 'bbr' or 'rate', not {congestion_control!r}")
    return Congestion(congestion_control)
