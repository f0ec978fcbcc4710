"""What a user of the library calls: `connect`, `send_kv`, `generate`, and `prepare` from `preparation`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from quic_pfec.kv.auto import AUTO, WireChoice, weigh
from quic_pfec.kv.layout import Layout
from quic_pfec.kv.prepared import PreparedKV
from quic_pfec.kv.profile import Profile
from quic_pfec.preparation import Order, prepare
from quic_pfec.quantities import described, integer, number
from quic_pfec.quic.configuration import check_token, configuration
from quic_pfec.quic.congestion import choose_congestion
from quic_pfec.quic.endpoint import open_connection
from quic_pfec.quic.handler import Handler, takes_late
from quic_pfec.quic.outgoing import HandoffRefused, Outgoing, Request, SendOptions
from quic_pfec.quic.protocol import PfecProtocol
from quic_pfec.quic.route import LARGEST_MTU, datagram_size
from quic_pfec.report import KVReport, LimitedBy, Symbols
from quic_pfec.schedule.policies import ALIASES, POLICY_NAMES
from quic_pfec.transfer.report import bits, outcome, symbols_digest
from quic_pfec.transfer.sender import TraceRow
from quic_pfec.wire import messages
from quic_pfec.wire.errors import AppCode, LocalError
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import MISSING_MODES

__all__ = [
    "Connection",
    "Generate",
    "KVReport",
    "KVText",
    "Missing",
    "Order",
    "check_scheduler",
    "connect",
    "prepare",
    "send_kv",
]

Missing = Literal["mask", "zero", "recompute"]
Late = Literal["drop", "patch"]

REPORT_PTOS = 3  # probe timeouts after the deadline that the receiver's report is waited for
REPORT_SLACK_S = 0.25


@dataclass(frozen=True, slots=True)
class Generate:
    """What the receiver does with the cache: it continues the context with `prompt` and then with new tokens.

    prompt: text (the receiver tokenises it, without special tokens) or token ids. max_new_tokens: 0 = none.
    score: token ids along which the receiver returns its teacher-forced top-1 predictions (`KVReport.scores`).
    """

    prompt: str | Sequence[int] = ""
    max_new_tokens: int = 64
    score: Sequence[int] = ()

    def message(self, handle: int = 0, token: str = "") -> messages.Generate:
        """Raises LocalError if it cannot be put on the wire."""
        integer("max_new_tokens", self.max_new_tokens, 0, messages.MAX_NEW_TOKENS)
        text = isinstance(self.prompt, str)
        return messages.Generate(
            prompt=self.prompt if isinstance(self.prompt, str) else "",
            prompt_tokens=() if text else _ids("prompt", self.prompt, "text or a sequence of token ids"),
            max_new_tokens=int(self.max_new_tokens),
            stream=True,
            score_tokens=_ids("score", self.score, "a sequence of token ids"),
            handle=handle,
            token=token,
        )


def _ids(name: str, values: Any, meaning: str) -> tuple[int, ...]:
    try:
        return tuple(integer(name, int(value), 0, (1 << 32) - 1, "token ids") for value in values)
    except LocalError:
        raise
    except (TypeError, ValueError):
        raise LocalError(f"{name} is {meaning}, not {described(values)}") from None


class Connection:
    """A connection to a peer that takes hand-offs. Made by `connect`; every method belongs to its event loop."""

    def __init__(self, protocol: PfecProtocol) -> None:
        self._protocol = protocol

    @property
    def extension(self) -> Literal["on", "off"]:
        """Whether both ends speak the extension; "off" means that hand-offs go over a plain stream."""
        return "on" if self._protocol.quic.extension is not None else "off"

    @property
    def protocol(self) -> PfecProtocol:
        """The protocol underneath, for tools and tests."""
        return self._protocol

    def trace(self, observer: Callable[[TraceRow], None] | None) -> None:
        """Calls `observer` for every symbol that later hand-offs send: a log of the window."""
        self._protocol.observer = observer

    async def generate(self, handle: int, request: Generate) -> KVText:
        """A later turn on a cache that the peer keeps. Raises HandoffRefused if it no longer does, ValueError if the
        request cannot be put on the wire."""
        integer("handle", handle, 1, (1 << 62) - 1, "KVReport.handle, a number")
        if not isinstance(request, Generate):
            raise LocalError(f"request is a quic_pfec.Generate(prompt, ...), not {described(request)}")
        question = Request(self._protocol, request.message(handle, self._protocol.token))
        self._protocol.begin(question)
        return KVText(question)

    @property
    def provisioned(self) -> bool:
        """Whether it sends at a rate that `connect` was given, so that what fits before a deadline is known."""
        return self._protocol.quic.congestion_control == "rate"

    def weigh(self, layout: Layout, deadline_s: float) -> WireChoice:
        """What wire_dtype="auto" comes to for a hand-off of `layout` with `deadline_s` seconds from now.

        It goes by the rate that the controller allows just now, and by the losses of this connection so far. For a
        prepared cache: `prepare(..., wire_dtype=lambda layout: conn.weigh(layout, 2.0).wire_dtype)`.
        """
        quic = self._protocol.quic
        return weigh(layout, quic.path, deadline_s - quic.min_rtt_s / 2, quic.loss_history.long)

    async def authorise(self) -> None:
        """Asks whether the peer takes our token, before anything costly is done for it. Raises HandoffRefused if not.

        It asks for a turn on a handle that nobody has (docs/wire.md section 7): any other answer means yes.
        """
        question = Request(self._protocol, Generate(max_new_tokens=0).message(0, self._protocol.token))
        self._protocol.begin(question)
        while await question.replies.get() is not None:
            pass
        if isinstance(question.error, HandoffRefused):
            if question.error.code is AppCode.UNAUTHORIZED:
                raise question.error
        elif question.error is not None:
            raise question.error


class KVText:
    """Generated text as it comes: iterate it, or `await text.whole()`."""

    def __init__(self, outgoing: Request, report: KVReport | None = None) -> None:
        self._outgoing = outgoing
        self._report = report
        self.tokens: list[int] = []
        self.scores: tuple[int, ...] = ()
        self.finish_reason = ""
        self.missing_used: str | None = None
        """Where the hand-off asked for "recompute": whether that was done, or "mask". None until decoding began."""

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for part in self._parts():
                yield part
        except (asyncio.CancelledError, GeneratorExit):
            self._outgoing.cancel()  # nobody reads any more: the peer need not generate what is left
            raise

    async def _parts(self) -> AsyncIterator[str]:
        while True:
            message = await self._outgoing.replies.get()
            match message:
                case None:
                    self._outgoing.replies.put_nowait(None)  # a second iteration ends at once, too
                    if self._outgoing.error is not None:
                        raise self._outgoing.error
                    return
                case messages.Text():
                    if message.token >= 0:
                        self.tokens.append(message.token)
                    yield message.text
                case messages.Scores():
                    self.scores = message.predictions
                    if self._report is not None:
                        self._report.scores = message.predictions
                case messages.Decoding():
                    self._note_decoding(message)
                case messages.Done():
                    self.finish_reason = message.reason
                    if self._report is not None:
                        self._report.finish_reason = message.reason
                        self._report.patched_before = message.patched
                case messages.Failed():
                    raise HandoffRefused(message.code, message.reason)
                case _:
                    continue

    async def whole(self) -> str:
        """All of it, joined."""
        return "".join([part async for part in self])

    def _note_decoding(self, message: messages.Decoding) -> None:
        report = self._report
        self.missing_used = message.missing_used or None
        if report is not None:
            report.missing_used = message.missing_used or report.missing
        if report is not None and report.frozen_s is not None:
            report.decode_started_s = report.frozen_s + message.started_after_freeze_us / 1e6
            report.decode_clock_s = message.clock_s


@asynccontextmanager
async def connect(
    host: str,
    port: int = 4433,
    *,
    ca_certs: str | None = None,
    insecure: bool = False,
    server_name: str | None = None,
    client_certificate: tuple[str, str] | None = None,
    token: str | None = None,
    congestion_control: str = "cubic",
    rate: str | float | None = None,
    lossy: bool = False,
    mtu: int = LARGEST_MTU,
    extension: bool = True,
    handler: Handler | None = None,
    limits: Limits | None = None,
    timeout_s: float = 10.0,
) -> AsyncIterator[Connection]:
    """Connects to a peer, TLS 1.3 always.

    ca_certs: PEM file of authorities to trust, default the system's. insecure: check no certificate (tests only).
    client_certificate: (certificate, key) files for mutual TLS. token: what the peer asks for. congestion_control:
    "cubic", "reno", "bbr", or "rate" together with `rate` ("50Mbps" or bit/s): a provisioned rate for a path that is
    known to lose packets; `rate` alone implies it. lossy: the path is known to lose packets, not its rate; "bbr" then
    bears random loss, and is implied. mtu: of the path in bytes, 1,248 to 1,500; where the route says that it
    carries less, that counts. extension=False: speak plain QUIC only. handler: takes the peer's hand-offs.

    Raises ConnectionError if the peer cannot be reached in time or not trusted, ValueError for settings that contradict
    each other and files that are not what they should be, OSError for files that cannot be read. Each says in one line
    what to do.
    """
    integer("port", port, 1, 65535)
    if not number("timeout_s", timeout_s, "a number of seconds, such as 10.0") > 0:
        raise LocalError(f"timeout_s is a number of seconds above 0, not {timeout_s}")
    check_token(token or None)
    if client_certificate is not None and not (isinstance(client_certificate, tuple) and len(client_certificate) == 2):
        raise LocalError(f"client_certificate is (certificate, key), two file names, not {client_certificate!r}")
    congestion = choose_congestion(congestion_control, rate, lossy)
    limits = limits or Limits()
    config = configuration(
        is_client=True,
        ca_certs=ca_certs,
        insecure=insecure,
        server_name=server_name,
        certificate=client_certificate,
        congestion_control=congestion.aioquic_name,
        max_datagram_size=datagram_size(mtu),
    )
    async with open_connection(
        host,
        port,
        configuration=config,
        make_protocol=lambda quic: PfecProtocol(quic, handler=handler, token=token or ""),
        # Who takes no hand-offs announces so, and keeps no memory for any.
        options={
            "limits": limits if handler else replace(limits, max_transfers=0),
            "enabled": extension,
            "late": takes_late(handler),
        },
        congestion=congestion,
        timeout_s=timeout_s,
    ) as protocol:
        yield Connection(protocol)


def check_scheduler(name: str) -> None:
    """Raises LocalError, which lists the names and says which is the paper's design, for a name that is none."""
    if name not in POLICY_NAMES and name not in ALIASES:
        raise LocalError(
            f"unknown scheduler {described(name)}: choose one of {', '.join(POLICY_NAMES)} "
            "(ddqn is the paper's design, priorityfec-paper, and hybrid the default)"
        )


async def send_kv(
    conn: Connection,
    cache: Any,
    deadline: float | None = None,
    *,
    deadline_at: float | None = None,
    tokens: Any = None,
    profile: Profile | None = None,
    order: Order = "utility",
    scheduler: str = "hybrid",
    repair_budget: float | None = None,
    wire_dtype: str | None = None,
    missing: Missing = "mask",
    late: Late = "drop",
    base: int = 0,
    then: Generate | None = None,
) -> KVReport:
    """Hands a cache over; the receiver freezes what it has at the deadline and goes on from there.

    cache: what `prepare` returned, or what it takes. deadline: seconds from this call (> 0); or deadline_at on
    `time.monotonic()`: exactly one of them. order, tokens, profile, wire_dtype: as in `prepare`, for a cache that is
    not prepared; wire_dtype may also be "auto": bf16 if all of it can be sent before the deadline at the connection's
    rate (with cubic or reno: what they allow just then), else progressive. Default: "auto" at a provisioned rate, which
    says what fits, else bf16, and bf16 for "priorityfec-paper". scheduler: one of
    `schedule.policies.POLICY_NAMES`; "priorityfec-paper", the paper's design, is its learned policy "ddqn";
    "paper-deficit" is the same with its heuristic. repair_budget: repairs plus resends allowed as a share of the
    symbols, None = no limit. missing: what the receiver does about holes; "recompute" computes those rows from `tokens`
    where that fits the receiver's time, else it masks (`KVReport.missing_used`). late: what becomes of what arrives
    after the freeze: it is dropped, or "patch": we go on sending, and the receiver patches whole units into the cache
    while it generates, if it knows how (`KVReport.late`, `KVReport.patched`); needs `then`, and holes, so not
    missing="recompute".
    base: handle of an earlier hand-off that holds the tokens before this one's first. then: what to generate, at the
    freeze, without another trip.

    Returns at the receiver's report, or at the deadline + 3 PTO with `confirmed=False`. A partial hand-off is a result.
    Raises ValueError (misuse), HandoffRefused (the peer will not), ConnectionError (the connection died). Cancelling
    the call frees both sides.
    """
    called_s = time.monotonic()
    if not isinstance(conn, Connection):
        raise LocalError(f"conn is what `async with quic_pfec.connect(...) as conn` gives, not {described(conn)}")
    if (deadline is None) == (deadline_at is None):
        raise LocalError("give exactly one of deadline (seconds from now) and deadline_at (time.monotonic())")
    name, value, clock = ("deadline", deadline, "from now") if deadline_at is None else (
        "deadline_at", deadline_at, "on time.monotonic()"
    )  # fmt: skip
    deadline_s = number(name, value, f"a number of seconds {clock}, such as 2.0")
    if deadline_at is None:
        deadline_s += called_s
    if not deadline_s > called_s:
        raise LocalError(f"the deadline is in the past: {name}={value!r} is {deadline_s - called_s:.3f} s from now")
    check_scheduler(scheduler)
    if missing not in MISSING_MODES:
        raise LocalError(f"missing must be one of {', '.join(MISSING_MODES)}, not {missing!r}")
    if late not in ("drop", "patch"):
        raise LocalError(f"late must be 'drop' or 'patch', not {late!r}")
    if repair_budget is not None and number("repair_budget", repair_budget, "a share of the symbols, such as 0.1") < 0:
        raise LocalError(f"repair_budget is a share of the symbols and cannot be negative: {repair_budget}")
    integer("base", base, 0, (1 << 62) - 1, "the handle of an earlier hand-off, KVReport.handle,")
    if then is not None and not isinstance(then, Generate):
        raise LocalError(f"then is a quic_pfec.Generate(prompt, ...), not {described(then)}")
    if late == "patch" and missing == "recompute":
        raise LocalError("late='patch' fills holes while it generates, missing='recompute' before: choose one of them")
    if late == "patch" and (then is None or not then.max_new_tokens):
        raise LocalError("late='patch' is of use while the receiver generates: give then=Generate(...) with new tokens")
    kv = cache
    if isinstance(kv, PreparedKV):
        belated = {"tokens": tokens, "profile": profile, "wire_dtype": wire_dtype}
        belated["order"] = None if order in ("utility", kv.order) else order
        for parameter, given in belated.items():
            if given is not None:
                raise LocalError(f"this cache is prepared: give {parameter}= to prepare(), where it takes effect")
    else:
        if wire_dtype is None and conn.provisioned and scheduler not in ALIASES:  # the paper's design sends bf16
            wire_dtype = AUTO
        kv = prepare(
            cache,
            tokens=tokens,
            profile=profile,
            order=order,
            wire_dtype=wire_dtype
            if wire_dtype != AUTO
            else lambda layout: conn.weigh(layout, deadline_s - time.monotonic()).wire_dtype,
        )
    if missing == "recompute" and kv.tokens is None:
        raise LocalError("missing='recompute' needs the token ids: give tokens=... (to prepare, for a prepared cache)")
    options = SendOptions(deadline_s, scheduler, repair_budget, missing, base, late=late == "patch")
    request = None if then is None else then.message()
    outgoing = Outgoing(conn.protocol, kv, options, request)
    outgoing.started_s = called_s
    conn.protocol.begin(outgoing)
    timeout_s = deadline_s - time.monotonic() + REPORT_PTOS * conn.protocol.quic.pto_s + REPORT_SLACK_S
    report: messages.Report | None
    try:
        report = await asyncio.wait_for(asyncio.shield(outgoing.report), max(0.0, timeout_s))
    except TimeoutError:
        report = None
    except asyncio.CancelledError:
        outgoing.cancel()
        raise
    outgoing.end_on_time()
    answer = _report(conn, outgoing, report)
    outgoing.release()
    return answer


def _report(conn: Connection, outgoing: Outgoing, report: messages.Report | None) -> KVReport:
    kv, sender, options = outgoing.kv, outgoing.sender, outgoing.options
    layout = kv.layout
    unit_of_sid, _ = kv.sid_units(outgoing.symbol_size)
    known = bits(b"" if report is None else report.known, len(unit_of_sid))
    complete = bits(b"" if report is None else report.complete, layout.unit_count)
    if sender is None:
        known = complete[unit_of_sid]
    result = outcome(known, complete, unit_of_sid, kv.utility)
    deadline_s = options.deadline_s - outgoing.started_s
    recovered = np.flatnonzero(bits(b"" if report is None else report.recovered, len(unit_of_sid)))
    verified = None
    if report is not None and sender is not None:
        encoder, _ = kv.symbols(outgoing.symbol_size)
        digest = symbols_digest(recovered.tolist(), encoder.symbol)
        verified = len(recovered) == 0 or digest == report.recovered_digest
    stats = sender.on_time if sender is not None else None
    answer = KVReport(
        handle=outgoing.accepted.handle if outgoing.accepted is not None else 0,
        confirmed=report is not None,
        extension="on" if sender is not None else "off",
        scheduler=options.scheduler if sender is not None else "stream",
        missing=options.missing,
        late="patch" if outgoing.late_s else "drop",
        wire_dtype=layout.wire_dtype,
        j_block=result.j_block,
        j_frac=result.j_frac,
        units_complete=result.units_complete,
        units_partial=result.units_partial,
        units_missing=result.units_missing,
        units_corrupt=0 if report is None else report.corrupt,
        unit_share=result.unit_share.reshape(-1, layout.columns),
        symbols=Symbols(
            total=len(unit_of_sid),
            source=stats.source if stats else 0,
            repair=stats.repair if stats else 0,
            resent=stats.resent if stats else 0,
            lost=stats.losses if stats else 0,
            recovered=len(recovered),
            repairs_useful=report.repairs_useful if report else 0,
            repairs_useless=report.repairs_useless if report else 0,
            repairs_late=report.repairs_late if report else 0,
        ),
        bytes_sent=stats.frame_bytes if stats else outgoing.bytes_sent,
        deadline_s=deadline_s,
        frozen_s=None if report is None else deadline_s - report.frozen_early_us / 1e6,
        limited_by=_limited_by(conn, outgoing, bool(complete.all())),
        recovered_verified=verified,
        started_clock_s=outgoing.started_s,
        first_packet_clock_s=None if stats is None else stats.first_packet_s,
        frozen_clock_s=None if report is None else report.frozen_clock_s,
        congestion_control=conn.protocol.quic.congestion_control,
        loss_threshold=conn.protocol.quic.loss_threshold,
    )
    answer.text = KVText(outgoing, answer).__aiter__()
    return answer


def _limited_by(conn: Connection, outgoing: Outgoing, complete: bool) -> LimitedBy:
    sender, quic = outgoing.sender, conn.protocol.quic
    if complete:
        return "nothing"
    if sender is None:
        return "deadline" if quic.has_own_pacer else "congestion_control"
    stats = sender.on_time
    if stats.slots_credit > stats.source:
        return "credit"
    packets = stats.source + stats.repair + stats.resent + stats.manifests
    if not quic.has_own_pacer:
        # With a standard controller the link itself is never known; blocked before the deadline means held back.
        return "congestion_control" if quic.blocked_cwnd - outgoing.blocked_cwnd_before > 0 else "deadline"
    if packets < 0.5 * sender.slots_total:
        return "congestion_control" if quic.rate_reduced else "cpu"
    return "deadline"
