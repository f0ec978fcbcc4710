"""`bbr`: the controller of `bbr_controller` with the pacer that goes with it."""

from __future__ import annotations

from quic_pfec.quic.bbr_controller import QUANTUM_S, BbrController
from quic_pfec.quic.bbr_model import DRAFT_LOSS_THRESHOLD, LOSSY_LOSS_THRESHOLD
from quic_pfec.quic.pacing import TokenBucket

__all__ = ["DRAFT_LOSS_THRESHOLD", "LOSSY_LOSS_THRESHOLD", "BbrController", "BbrPacer", "bbr_control"]

LATE_TIMER_S = 0.010  # whoever waited for the pacer and came this late had nothing to send, or no processor to send it


def bbr_control(
    *,
    lossy: bool = False,
    loss_threshold: float | None = None,
    max_datagram_size: int = 1452,
    burst_s: float = QUANTUM_S,
    seed: int | None = None,
) -> tuple[BbrController, BbrPacer]:
    """Controller and pacer for `ExtensionConnection.set_congestion_control`.

    lossy: the path is known to lose packets at random. loss_threshold: instead of the value that follows from that.
    burst_s: what may leave at once, in seconds of the pacing rate.
    seed: of the random times between probes; None: of the system.
    """
    if loss_threshold is None:
        loss_threshold = LOSSY_LOSS_THRESHOLD if lossy else DRAFT_LOSS_THRESHOLD
    controller = BbrController(max_datagram_size=max_datagram_size, loss_threshold=loss_threshold, seed=seed)
    return controller, BbrPacer(controller, max_datagram_size=max_datagram_size, burst_s=burst_s)


class BbrPacer(TokenBucket):
    """Token bucket in bytes of UDP payload, the unit of the model, at the model's pacing rate."""

    def __init__(
        self,
        controller: BbrController,
        *,
        max_datagram_size: int = 1452,
        burst_s: float = QUANTUM_S,
        catch_up_s: float = 0.004,
    ) -> None:
        super().__init__(max_datagram_size=max_datagram_size, overhead=0, burst_s=burst_s, catch_up_s=catch_up_s)
        self._controller = controller
        controller.ask_pacer(self.holds_back)

    @property
    def rate_bytes_per_s(self) -> float:
        return self._controller.pacing_rate_bytes_per_s

    @property
    def rate_bps(self) -> float:
        return self._controller.rate_bps

    @property
    def reduced(self) -> bool:
        return self._controller.held_back

    def next_send_time(self, now: float) -> float | None:
        self._controller.check_app_limited(now)
        return super().next_send_time(now)

    def holds_back(self, now: float) -> bool:
        """Whether the last who asked was told to wait, and has not let much more than that time pass."""
        return self._due_s is not None and now <= self._due_s + LATE_TIMER_S
