"""The deterministic policies, each one rule of a few lines, and the registry that names them and the learned ones.

These classes are the specification, and the twins of schedule/policies.c, which `make_policy` hands out. A decision
depends on the state alone: the sender may ask again before it sends anything, and what was not sent must not count. The
parameters of a rule are the fields of its class; `compiled` makes other values as fast. `window` says which coding set
a policy's repairs use: "sack" = sent symbols not known to have arrived, "full" = everything after the decoded prefix
(the paper's window).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from math import inf, sqrt
from pathlib import Path
from typing import Any, Literal, Protocol

from quic_pfec.schedule.compiled import AVAILABLE, native
from quic_pfec.schedule.flec import FlecRt
from quic_pfec.schedule.learned import Ddqn, Overridden
from quic_pfec.schedule.network import Network, load_network, packaged_networks
from quic_pfec.schedule.state import IDLE, REPAIR, REPAIR_BURSTS, RESEND, SOURCE, Action, ActionKind, State
from quic_pfec.wire.errors import LocalError

Window = Literal["sack", "full"]


class Policy(Protocol):
    """Chooses what the next packet carries."""

    @property
    def window(self) -> Window: ...

    def decide(self, state: State) -> Action: ...


def _spare(state: State) -> bool:
    """Is the slot free for a repair when no source may leave? Yes after the last source; while only credit is missing,
    no if that would eat a budget which resends will need.
    """
    return state.sources_sent == state.sources_total or state.budget_left == inf


@dataclass(slots=True)
class NoProtection:
    """Sources in order, then silence: what priority order alone gives."""

    window: Window = "sack"

    def decide(self, state: State) -> Action:
        return SOURCE if state.can_source else IDLE


@dataclass(slots=True)
class Fixed:
    """One repair per 1/rate sources, whatever is lost; after the last source, repairs until the deadline."""

    rate: float = 0.1
    window: Window = "sack"

    def decide(self, state: State) -> Action:
        due = int(self.rate * state.sources_sent + 1e-9)  # 0.29 * 100 is 29
        if state.can_repair and state.repairs_sent < due:
            return REPAIR
        if state.can_source:
            return SOURCE
        return REPAIR if state.can_repair and _spare(state) else IDLE


@dataclass(slots=True)
class Arq:
    """Resends a known loss, the most useful first; else the next source; else waits. No coding at all."""

    window: Window = "sack"

    def decide(self, state: State) -> Action:
        if state.can_resend:
            return RESEND
        return SOURCE if state.can_source else IDLE


@dataclass(slots=True)
class Deficit:
    """A repair while the receiver lacks more degrees of freedom than the repairs in flight should bring.

    This is the heuristic that the paper warms its learner up with (section IV-C): no resends, no prediction.
    """

    window: Window = "sack"

    def decide(self, state: State) -> Action:
        expected = (1.0 - state.loss_short) * state.repairs_in_flight
        if state.can_repair and state.feedback_deficit - expected > 0.5:
            return REPAIR
        if state.can_source:
            return SOURCE
        return REPAIR if state.can_repair and _spare(state) else IDLE


_BURSTS = tuple(Action(ActionKind.REPAIR, count) for count in sorted(REPAIR_BURSTS, reverse=True))


@dataclass(slots=True)
class Epoch:
    """As deficit, but it also expects a share of the losses in flight, and repairs in bursts of up to what is lacking.

    alpha: the share of the expected loss in flight that is covered before it is known.
    """

    alpha: float = 0.3
    window: Window = "sack"

    def decide(self, state: State) -> Action:
        loss = state.loss_short
        lacking = state.feedback_deficit + self.alpha * loss * state.in_flight - (1.0 - loss) * state.repairs_in_flight
        if state.can_repair:
            room = min(state.budget_left, max(1, state.slots_left))
            for burst in _BURSTS:
                if burst.count <= min(lacking, room):
                    return burst
        if state.can_source:
            return SOURCE
        return REPAIR if state.can_repair and _spare(state) else IDLE


_LONG_RTT = 100.0
_ENOUGH_FATES = 20  # as many as the prior of the loss rate stands for


@dataclass(slots=True)
class Hybrid:
    """Resend what is known to be lost; code, late, over what a resend can no longer save; open nothing that cannot end.

    horizon_rtt: the end phase begins at this many round trips before the deadline.
    alpha: how much of the expected loss in flight is covered; spread: how many standard deviations on top (the factor
    8 under the root is the variance inflation of bursty loss); open_share: a unit is opened in the end phase only if
    this share of its packets still fits; blind_share: the same while at most two units are at stake and the path is
    not known yet, where one more unit is worth more than what it may cost.
    hold_rtt: where more will be lost than the budget can make up for and the time is over a hundred round trips,
    resends wait until what they need and so many round trips are left, and then go where they complete most for a
    packet; no code is sent. 0 = never.
    crowd: with more packets in flight than this, a repair combines `wide_degree` symbols, for at the usual degree it
    would miss most of them, and the loss rate is doubted: its variance after so many fates, times `doubt`, counts too.
    """

    horizon_rtt: float = 0.5
    alpha: float = 1.3
    open_share: float = 1.3
    spread: float = 0.5
    blind_share: float = 1.25
    hold_rtt: float = 3.0
    doubt: float = 4.0
    crowd: float = 200.0
    wide_degree: float = 192.0
    window: Window = "sack"

    def degree(self, state: State, usual: int, most: int) -> int:
        """Symbols that a repair combines, at most `most`."""
        if state.in_flight <= self.crowd or self.wide_degree <= usual:
            return usual
        return int(min(self.wide_degree, most))

    def ranks(self, state: State) -> bool:
        """Are losses to be resent by what completes units?"""
        leaving = min(state.sources_total, state.slots_total)
        return (
            self.hold_rtt > 0.0
            and state.slots_total > _LONG_RTT * state.rtt_slots
            and state.budget_left + state.packets_extra < state.loss_long * leaving
        )

    def _ration(self, state: State) -> Action:
        loss = state.loss_long
        need = min(state.budget_left, (state.known_lost + loss * state.in_flight) / (1.0 - loss))
        due = state.slots_left <= need + self.hold_rtt * state.rtt_slots
        if state.can_resend and (due or not state.can_source):
            return RESEND
        return SOURCE if state.can_source else IDLE

    def decide(self, state: State) -> Action:
        if self.ranks(state):
            return self._ration(state)
        if state.can_resend:
            return RESEND
        if state.slots_left <= self.horizon_rtt * state.rtt_slots and state.can_repair:
            if state.in_flight > 0:
                expected_loss = state.loss_long * state.in_flight
                wanted = self.alpha * expected_loss + self.spread * sqrt(self._variance(state))
                if wanted - (1.0 - state.loss_long) * state.repairs_in_flight > 0.5:
                    return REPAIR
            opens = state.can_source and state.unit_position == 0
            little = state.fates < _ENOUGH_FATES and state.unresolved <= 2 * state.unit_packets
            open_share = self.blind_share if little else self.open_share
            if opens and state.slots_left < open_share * state.unit_packets and state.unresolved > 0:
                return REPAIR
        if state.can_source:
            return SOURCE
        return REPAIR if state.can_repair and _spare(state) else IDLE

    def _variance(self, state: State) -> float:
        flying, loss = float(state.in_flight), state.loss_long
        variance = 8.0 * (loss * flying)
        if flying > self.crowd:
            unsure = (flying - self.crowd) / flying
            variance += unsure * self.doubt * loss * (1.0 - loss) / (state.fates + 20.0) * flying * flying
        return variance


def _paper_deficit() -> Policy:
    return Deficit(window="full")


def _flec_window() -> Policy:
    # One repair a loss: the stretches of a wide pruned head, which want several, would leave most losses without any.
    return FlecRt("flec-rt-window", window="full")


def _flec_spread() -> Policy:
    return FlecRt("flec-rt-spread", window="full")


@lru_cache(maxsize=16)
def _read(source: str | Path, modified_ns: int = 0) -> Network:
    """A network changes nothing, so that transfers may share it; a file that was written since is read again."""
    return load_network(source)


def _learned(network: Network) -> Policy:
    """What a network makes: the paper's policy, or hybrid overridden."""
    if network.kind == "q":
        return Ddqn(network, window=network.window)
    return Overridden(Hybrid(), network, window=network.window)


def _ddqn() -> Policy:
    return _learned(_read("ddqn-paper"))


def _ddqn_wide() -> Policy:
    return _learned(_read("ddqn-wide"))


def _hybrid() -> Policy:
    if _OVERRIDE not in packaged_networks():
        return Hybrid()
    network = _read(_OVERRIDE)
    return Hybrid() if network.margin is None else _learned(network)


_OVERRIDE = "hybrid-override"
_FILE_KINDS = {"ddqn": "q", "hybrid": "advantage"}
_FACTORIES: dict[str, Callable[[], Policy]] = {
    "none": NoProtection,
    "fixed": Fixed,
    "arq": Arq,
    "deficit": Deficit,
    # The paper's design with its deficit heuristic in the place of the learned policy: full window, no resends.
    "paper-deficit": _paper_deficit,
    "epoch": Epoch,
    "flec-rt": FlecRt,
    "flec-rt-window": _flec_window,
    "flec-rt-spread": _flec_spread,
    "hybrid": _hybrid,
    "hybrid-rule": Hybrid,
}
# The learned ones exist where their weights do.
_FACTORIES |= {
    name: make
    for name, weights, make in (("ddqn", "ddqn-paper", _ddqn), ("ddqn-wide", "ddqn-wide", _ddqn_wide))
    if weights in packaged_networks()
}
_RULES: dict[type[Any], str] = {
    NoProtection: "none", Fixed: "fixed", Arq: "arq", Deficit: "deficit", Epoch: "epoch", Hybrid: "hybrid",
}  # fmt: skip

POLICY_NAMES: tuple[str, ...] = tuple(_FACTORIES)
ALIASES = {"priorityfec-paper": "ddqn"}
"""Names of designs: the paper's is its learned policy, over the full window and without resends."""


def make_twin(name: str, *, files: bool = False) -> Policy:
    """A fresh policy in Python. Raises ValueError naming the choices if `name` is none of `POLICY_NAMES` or `ALIASES`.

    files: also "ddqn:PATH" and "hybrid:PATH", with the weights of that file (LocalError and OSError as
    `schedule.network.load_network`). For local tools: a name that someone else chose must not open files.
    """
    kind, mark, path = name.partition(":")
    if files and mark and kind in _FILE_KINDS:
        network = _read(Path(path), Path(path).stat().st_mtime_ns)
        if network.kind != _FILE_KINDS[kind]:
            raise LocalError(f"{kind} needs a network of kind {_FILE_KINDS[kind]!r}, {path} is of {network.kind!r}")
        return _learned(network)
    try:
        return _FACTORIES[ALIASES.get(name, name)]()
    except KeyError:
        raise ValueError(f"unknown scheduler {name!r}: choose one of {', '.join(POLICY_NAMES)}") from None


def compiled(policy: Policy) -> Policy:
    """The compiled form of a rule of ours, with the parameters that it has now; any other policy as it is.

    A rule that remembers begins anew.
    """
    if not AVAILABLE:
        return policy
    if type(policy) is FlecRt:
        return native.Policy(policy.variant, policy.window, headroom=policy.headroom)
    if type(policy) is Ddqn:
        return native.Policy("ddqn", policy.window, network=policy.network)
    if type(policy) is Overridden and type(policy.base) is Hybrid:
        return native.Policy("hybrid", policy.window, network=policy.network, **_numbers(policy.base))
    name = _RULES.get(type(policy))
    return policy if name is None else native.Policy(name, policy.window, **_numbers(policy))


def _numbers(rule: Any) -> dict[str, Any]:
    return {field.name: getattr(rule, field.name) for field in fields(rule) if field.name != "window"}


def make_policy(name: str, *, files: bool = False) -> Policy:
    """Return a fresh policy for one transfer, compiled where that was built.

    Raises ValueError naming the choices if `name` is none of `POLICY_NAMES`; files: as `make_twin`.
    """
    return compiled(make_twin(name, files=files))
