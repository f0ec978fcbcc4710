"""Loss processes: which steps of a channel lose what is sent in them.

Schemes can only be compared on the same losses, so a channel is a sequence of bits that depends on its parameters and
its seed alone, never on what is sent. The simulator, the relay and any other implementation draw from the generator
written down here, in the order written down here, and therefore agree bit by bit.

**Order of the draws** of a Gilbert-Elliott channel: one uniform number chooses the first state from the stationary
distribution; then each step takes two, the first decides whether the step loses (by the state), the second whether
the state moves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "PRESETS",
    "Channel",
    "ChannelFactory",
    "GilbertElliott",
    "GilbertElliottChannel",
    "NoLoss",
    "SplitMix64",
    "TraceChannel",
    "TraceEnded",
    "channel_factory",
    "direction_seed",
    "losses",
    "parse",
]

Bits = npt.NDArray[np.bool_]

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

# Drawing in blocks makes a bit cost some ten nanoseconds instead of microseconds; the sequence is the same.
_BLOCK_STEPS = 1024


class SplitMix64:
    """The generator SplitMix64 (Steele, Lea, Flood 2014): 64 bits of state, any seed is good.

    It fits five lines of C, which is what lets other implementations repeat our losses, and its state is a counter,
    so that a block of outputs is computed at once. The wire format draws its coefficients with it too.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK64

    def next(self) -> int:
        """The next output, 0 <= x < 2**64."""
        self._state = (self._state + _GOLDEN) & _MASK64
        z = self._state
        z = ((z ^ (z >> 30)) * _MIX_1) & _MASK64
        z = ((z ^ (z >> 27)) * _MIX_2) & _MASK64
        return z ^ (z >> 31)

    def uniform(self) -> float:
        """The next output as a number in [0, 1): its upper 53 bits, all that a double holds."""
        return (self.next() >> 11) * 2.0**-53

    def uniforms(self, count: int) -> npt.NDArray[np.float64]:
        """The next `count` values of `uniform`, bit for bit, as float64[count]."""
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(self._state)
        self._state = (self._state + count * _GOLDEN) & _MASK64
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
        z ^= z >> np.uint64(31)
        return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class GilbertElliott:
    """Parameters of a two-state channel, all probabilities a step.

    `loss_good` and `loss_bad` are the loss probabilities in the two states, `p_good_bad` and `p_bad_good` the
    transition probabilities. Raises ValueError for a value outside [0, 1] or when neither state can be left, because
    then no stationary distribution exists to start from.
    """

    loss_good: float
    loss_bad: float
    p_good_bad: float
    p_bad_good: float

    def __post_init__(self) -> None:
        for name in ("loss_good", "loss_bad", "p_good_bad", "p_bad_good"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is a probability, got {value!r}")
        if self.p_good_bad + self.p_bad_good == 0.0:
            raise ValueError("p_good_bad and p_bad_good are both 0: the channel has no stationary start")

    @property
    def stationary_bad(self) -> float:
        """Share of the steps spent in the bad state."""
        return self.p_good_bad / (self.p_good_bad + self.p_bad_good)

    @property
    def mean_loss(self) -> float:
        """Share of the steps that lose."""
        bad = self.stationary_bad
        return (1.0 - bad) * self.loss_good + bad * self.loss_bad

    @property
    def mean_loss_run(self) -> float:
        """Mean number of consecutive losing steps in a run of losses; 0 for a channel that never loses.

        Infinite for one that never stops losing.
        """
        start, lose, _ = self._run_matrices()
        starts = float((start @ lose).sum())
        if starts == 0.0:
            return 0.0 if self.mean_loss == 0.0 else float("inf")
        return self.mean_loss / starts

    def loss_run_shares(self, longest: int) -> list[float]:
        """Shares of loss runs that are exactly 1, 2, ..., `longest` steps long (exact, by the Markov chain)."""
        start, lose, keep = self._run_matrices()
        starts = float((start @ lose).sum())
        if starts == 0.0:
            return [0.0] * longest
        shares = []
        row = start
        for _ in range(longest):
            row = row @ lose
            shares.append(float((row @ keep).sum()) / starts)
        return shares

    def _run_matrices(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """State weights after a stationary step without loss, and the one-step matrices with and without loss."""
        moves = np.array([[1 - self.p_good_bad, self.p_good_bad], [self.p_bad_good, 1 - self.p_bad_good]])
        loss = np.array([self.loss_good, self.loss_bad])
        lose, keep = np.diag(loss) @ moves, np.diag(1 - loss) @ moves
        return np.array([1 - self.stationary_bad, self.stationary_bad]) @ keep, lose, keep


PRESETS: dict[str, GilbertElliott] = {
    # The paper's channel (arXiv 2610.21390, its section V): 8.4 % lost.
    "paper": GilbertElliott(0.001, 0.5, 0.02, 0.1),
    # 5 %, independent: the usual model, and the easiest for a code.
    "iid5": GilbertElliott(0.05, 0.05, 0.5, 0.5),
    # 2 % in bursts: half of a bad state of four steps, every hundred steps.
    "ge2": GilbertElliott(0.001, 0.5, 0.01, 0.25),
    # 8 % like the paper's, in bursts five times as long.
    "long8": GilbertElliott(0.001, 0.5, 0.004, 0.02),
    # Fitted to NUWiNS pings every 200 ms: Starlink 1.95 % lost, mean burst 2.18; AT&T 0.67 %, 5.08; Verizon 0.21 %,
    # 4.44. A step is then a packet of a stream, not 200 ms: they lend a burst structure, not a time scale.
    "starlink": GilbertElliott(0.0, 1.0, 0.0091, 0.459),
    "att": GilbertElliott(0.0, 1.0, 0.0013, 0.197),
    "verizon": GilbertElliott(0.0, 1.0, 0.0005, 0.225),
    "none": GilbertElliott(0.0, 0.0, 0.0, 1.0),
}
"""Channels by name: `paper`, `iid5`, `ge2`, `long8`, `starlink`, `att`, `verizon`, `none`."""


def parse(text: str) -> GilbertElliott:
    """A preset's name, or "loss_good,loss_bad,p_good_bad,p_bad_good" as in "0.001,0.5,0.02,0.1".

    Raises ValueError with the names that exist.
    """
    if text in PRESETS:
        return PRESETS[text]
    fields = text.split(",")
    if len(fields) != 4:
        raise ValueError(f"{text!r} is neither a channel ({', '.join(PRESETS)}) nor four numbers joined by commas")
    try:
        values = [float(field) for field in fields]
    except ValueError:
        raise ValueError(f"{text!r}: a Gilbert-Elliott channel is four numbers joined by commas") from None
    return GilbertElliott(*values)


class Channel(Protocol):
    """A loss process."""

    def lost(self) -> bool:
        """One step of the process: True if what is sent in this step is lost."""


ChannelFactory = Callable[[], Channel]
"""Makes the same channel anew, from its first step: what a link keeps, to restart its losses."""


class _BlockChannel(ABC):
    """A channel drawn in blocks; `lost` and `take` walk one and the same sequence."""

    __slots__ = ("_block", "_position")

    def __init__(self) -> None:
        self._block = b""
        self._position = 0

    def lost(self) -> bool:
        """The next step: True if it loses."""
        if self._position == len(self._block):
            self._block = self._draw(_BLOCK_STEPS).tobytes()
            self._position = 0
        bit = self._block[self._position]
        self._position += 1
        return bit == 1

    def take(self, count: int) -> Bits:
        """The next `count` steps, bool[count], True where the step loses."""
        head = self._block[self._position : self._position + count]
        self._position += len(head)
        bits = np.frombuffer(head, dtype=np.bool_).copy()
        missing = count - len(head)
        if missing:
            # A block at least, so that many small requests do not pay for an array each.
            drawn = self._draw(max(missing, _BLOCK_STEPS))
            bits = np.concatenate([bits, drawn[:missing]])
            self._block, self._position = drawn[missing:].tobytes(), 0
        return bits

    @abstractmethod
    def _draw(self, count: int) -> Bits:
        """The next 1 <= `count` steps of the process; fewer where it ends, and then at least one."""


class GilbertElliottChannel(_BlockChannel):
    """The two-state channel of `params`, started from its stationary distribution, repeatable from `seed`."""

    __slots__ = ("_bad", "_params", "_random")

    def __init__(self, params: GilbertElliott, seed: int) -> None:
        super().__init__()
        self._params = params
        self._random = SplitMix64(seed)
        self._bad = self._random.uniform() < params.stationary_bad

    def _draw(self, count: int) -> Bits:
        uniforms = self._random.uniforms(2 * count).reshape(count, 2)
        bad = self._walk(uniforms[:, 1])
        return uniforms[:, 0] < np.where(bad, self._params.loss_bad, self._params.loss_good)

    def _walk(self, moves: npt.NDArray[np.float64]) -> Bits:
        """The state (True = bad) in which each step is taken; leaves the state after the last one in `_bad`.

        A move below both transition probabilities flips the state, whichever it is; one between them leads to the
        state that is easier to reach, whichever it was; one above both changes nothing. So the state is known from
        the last move of the second kind and the parity of the flips since.
        """
        to_bad, to_good = self._params.p_good_bad, self._params.p_bad_good
        flips = moves < min(to_bad, to_good)
        settles = (moves < max(to_bad, to_good)) & ~flips
        flip_count: npt.NDArray[np.int64] = np.cumsum(flips)
        last = np.maximum.accumulate(np.where(settles, np.arange(len(moves)), -1))
        settled = last >= 0
        flips_since: npt.NDArray[np.int64] = flip_count - np.where(settled, flip_count[last], 0)
        after: Bits = np.where(settled, to_bad > to_good, self._bad) ^ (flips_since % 2 == 1)
        before = np.concatenate([[self._bad], after[:-1]])
        self._bad = bool(after[-1])
        return before


class TraceEnded(Exception):
    """A trace channel that does not wrap was asked for more steps than its trace has."""


class TraceChannel(_BlockChannel):
    """Replays measured losses, one bit a step.

    `bits` is bytes of 0 and 1 or a bool array, `start` the step to begin with. After the last bit the trace begins
    again at its first one, or with `wraps=False` raises TraceEnded. Raises ValueError for an empty trace, a value
    other than 0 and 1, or a start outside it.
    """

    __slots__ = ("_bits", "_next", "_wraps")

    def __init__(self, bits: bytes | npt.ArrayLike, wraps: bool = True, start: int = 0) -> None:
        super().__init__()
        values = np.frombuffer(bits, dtype=np.uint8) if isinstance(bits, bytes) else np.asarray(bits)
        if values.ndim != 1 or not len(values):
            raise ValueError("a trace is a non-empty row of bits")
        if not np.isin(values, (0, 1)).all():
            raise ValueError("a trace holds only 0 (arrived) and 1 (lost)")
        if not 0 <= start < len(values):
            raise ValueError(f"start {start} is outside the trace of {len(values)} steps")
        self._bits = values.astype(np.bool_)
        self._wraps = wraps
        self._next = start

    def _draw(self, count: int) -> Bits:
        if not self._wraps:
            count = min(count, len(self._bits) - self._next)
            if count <= 0:
                raise TraceEnded(f"the trace has {len(self._bits)} steps and does not wrap")
        steps = (self._next + np.arange(count)) % len(self._bits)
        self._next += count
        return self._bits[steps]

    def take(self, count: int) -> Bits:
        """The next `count` steps, bool[count]; raises TraceEnded if the trace does not wrap and has fewer."""
        bits = super().take(count)
        if len(bits) < count:
            raise TraceEnded(f"the trace has {len(self._bits)} steps and does not wrap")
        return bits


class NoLoss:
    """A channel that loses nothing."""

    __slots__ = ()

    def lost(self) -> bool:
        """Always False."""
        return False

    def take(self, count: int) -> Bits:
        """`count` steps without loss, bool[count]."""
        return np.zeros(count, dtype=np.bool_)


def losses(channel: Channel, slots: int) -> Bits:
    """The next `slots` steps of `channel`, bool[slots], True where what is sent in the slot is lost."""
    if isinstance(channel, _BlockChannel | NoLoss):
        return channel.take(slots)
    return np.fromiter((channel.lost() for _ in range(slots)), dtype=np.bool_, count=slots)


def direction_seed(seed: int, direction: int) -> int:
    """The seed of one direction of a link: 0 is forward (towards the server), 1 is back."""
    return seed * 2 + direction


def channel_factory(model: GilbertElliott | Bits | None, seed: int, *, start: int = 0) -> ChannelFactory:
    """Makes `model` from its first step at each call: parameters, the bits of a trace (wrapping), or None (no loss).

    `seed` belongs to Gilbert-Elliott, `start` (the step to begin with) to a trace. Bad values raise ValueError here.
    """
    factory: ChannelFactory
    if model is None:
        factory = NoLoss
    elif isinstance(model, GilbertElliott):
        params = model
        factory = lambda: GilbertElliottChannel(params, seed)  # noqa: E731
    else:
        bits = model
        factory = lambda: TraceChannel(bits, start=start)  # noqa: E731
    factory()
    return factory
