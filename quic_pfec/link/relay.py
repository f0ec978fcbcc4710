"""A lossy bottleneck for real UDP datagrams, in one thread and without any rights.

It applies `sim.link.Link` to what passes between clients and one server, so that anything that speaks UDP meets the
channel of the simulator, slot by slot. Each client address gets an upstream socket of its own, as behind a NAT; all
clients share the two directions of the one bottleneck.

Two things keep the relay's own scheduling out of the measurement. Arrivals are stamped by the kernel, so that a relay
that wakes up late does not take a paced flow for a burst and drop it at the queue. And it waits in select(2), whose
timeout has microseconds where poll and epoll have milliseconds. What lateness remains is reported.
"""

from __future__ import annotations

import heapq
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quic_pfec.link.options import Address, RelayOptions
from quic_pfec.link.realtime import ask_for_real_time, sharpen_timers
from quic_pfec.link.report import DirectionReport, Lateness, RelayReport
from quic_pfec.sim.link import Delivery, Link

__all__ = ["RING_DATAGRAMS", "Relay"]

RING_DATAGRAMS = 16_384
"""Datagrams on their way in one direction; one more is dropped and voids the run."""

_SOCKET_BUFFER_BYTES = 4 << 20
_DATAGRAMS_PER_TURN = 64
_LARGEST_DATAGRAM = 65_535

# Longest sleep: in it the losses of idle slots are drawn, so that no single turn has to draw minutes of them.
_IDLE_S = 0.25

_CALL_TIMEOUT_S = 30.0

# Linux (asm-generic): the option, and the type of the control message that carries a struct timespec.
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@ll")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)

_T = TypeVar("_T")


class _Flow:
    """A client and the socket through which the server sees it."""

    __slots__ = ("client", "closed", "socket", "used_s")

    def __init__(self, client: Any, upstream: socket.socket) -> None:
        self.client = client
        self.socket = upstream
        self.used_s = 0.0
        self.closed = False


@dataclass(slots=True)
class _Direction:
    """A link, what is on its way through it, and the relay's own counters. Entries: due, order, flow, datagram."""

    link: Link
    now_s: float
    ring: list[tuple[float, int, _Flow, bytes]] = field(default_factory=list)
    lateness: Lateness = field(default_factory=Lateness)
    entered: int = 0
    sent: int = 0
    ring_drops: int = 0
    write_errors: int = 0
    orphaned: int = 0

    def tick(self, time_s: float) -> float:
        """The time for the link: never before one it has seen, because several sockets are read in turn."""
        self.now_s = max(self.now_s, time_s)
        return self.now_s

    def accept(self, now: float, flow: _Flow, data: bytes) -> None:
        if len(self.ring) >= RING_DATAGRAMS:
            self.ring_drops += 1
            return
        outcome = self.link.send(now, len(data))
        if isinstance(outcome, Delivery):
            self.entered += 1
            heapq.heappush(self.ring, (outcome.due_s, self.entered, flow, outcome.apply(data)))

    def epoch(self, now: float) -> None:
        self.link.epoch(self.tick(now))
        self.lateness = Lateness()
        self.sent = self.ring_drops = self.write_errors = self.orphaned = 0

    def report(self) -> DirectionReport:
        lateness = Lateness(list(self.lateness.counts), self.lateness.total_s, self.lateness.largest_s)
        return DirectionReport(
            link=self.link.stats(),
            lateness=lateness,
            sent=self.sent,
            ring_drops=self.ring_drops,
            write_errors=self.write_errors,
            orphaned=self.orphaned,
            in_flight=len(self.ring),
        )


class Relay:
    """The relay. Bound to its port when constructed; serves in `run()` (this thread) or `start()` (its own).

    `epoch()`, `report()` and `close()` may be called from any thread. Raises OSError when it cannot bind or resolve.
    """

    def __init__(self, options: RelayOptions) -> None:
        self.options = options
        now = time.monotonic()
        self._forward, self._backward = (_Direction(link, now) for link in options.links())
        self._upstream_family, self._upstream_address = _resolve(options.upstream)
        family, address = _resolve(options.listen)
        self._listener = _udp_socket(family)
        try:
            self._listener.bind(address)
        except OSError:
            self._listener.close()
            raise
        self._flows: dict[Any, _Flow] = {}
        self._sockets: dict[socket.socket, _Flow | None] = {self._listener: None}
        self._evicted = 0
        self._kernel_stamps = False
        self._real_time = False
        self._buffer = bytearray(_LARGEST_DATAGRAM)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # guards the two below
        self._running = False
        self._stopping = False
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def address(self) -> Address:
        """(host, port) that clients send to."""
        name = self._listener.getsockname()
        return name[0], name[1]

    @property
    def port(self) -> int:
        """The port that clients send to."""
        return self.address[1]

    def __enter__(self) -> Relay:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Serve in a thread of its own until `close`; returns when it serves."""
        self._thread = threading.Thread(target=self._run_kept, name="quic_pfec relay", daemon=True)
        self._thread.start()
        self._started.wait()

    def run(self) -> None:
        """Serve in this thread until `stop` or `close` is called in another."""
        sharpen_timers()
        if self.options.fifo:
            self._real_time = ask_for_real_time()
        with self._lock:
            self._running = True
        self._started.set()
        try:
            while not self._stopping:
                self._turn()
        finally:
            with self._lock:
                self._running = False
            self._run_calls()

    def stop(self) -> None:
        """Ask `run` to return; the sockets stay open until `close`."""
        self._stopping = True
        self._wake()

    def close(self) -> None:
        """Stop, wait for the thread, close all sockets. Raises what made the thread fail, if anything did."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for sock in (*self._sockets, self._wake_receiver, self._wake_sender):
            sock.close()
        self._sockets.clear()
        self._flows.clear()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def epoch(self) -> float:
        """Restart slots, losses, counters and logs now; returns the time of it on time.monotonic()."""
        return self._call(self._do_epoch)

    def report(self) -> RelayReport:
        """Everything since the last epoch."""
        return self._call(self._do_report)

    # In the serving thread.

    def _turn(self) -> None:
        readable, _, _ = select.select([*self._sockets, self._wake_receiver], [], [], self._sleep_s())
        for sock in readable:
            if sock is self._wake_receiver:
                self._wake_receiver.recv(4096)
            elif sock in self._sockets:  # not closed by an eviction earlier in this turn
                self._read(sock)
        # Calls come after the datagrams that were there before them, so that an epoch has none of the past in it.
        self._run_calls()
        self._deliver()
        if not readable:
            now = time.monotonic()
            for direction in (self._forward, self._backward):
                direction.link.advance(direction.tick(now))

    def _sleep_s(self) -> float:
        due_s = min((d.ring[0][0] for d in (self._forward, self._backward) if d.ring), default=float("inf"))
        return max(0.0, min(due_s - time.monotonic(), _IDLE_S))

    def _read(self, sock: socket.socket) -> None:
        buffers = [memoryview(self._buffer)]
        monotonic_offset_s = time.time() - time.monotonic()
        for _ in range(_DATAGRAMS_PER_TURN):
            try:
                size, ancillary, _, sender = sock.recvmsg_into(buffers, _ANCILLARY_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # an ICMP error for an earlier datagram: the server is not there (yet)
            now = time.monotonic()
            stamp_s = _kernel_stamp(ancillary)
            self._kernel_stamps = stamp_s is not None
            if stamp_s is not None:
                # The wall clock may be set at any time; the present bounds what a stamp can say.
                now = min(now, stamp_s - monotonic_offset_s)
            data = bytes(buffers[0][:size])
            flow = self._sockets[sock]
            if flow is None:
                flow = self._flow_of(sender)
                direction = self._forward
            else:
                direction = self._backward
            flow.used_s = now
            direction.accept(direction.tick(now), flow, data)

    def _flow_of(self, client: Any) -> _Flow:
        flow = self._flows.get(client)
        if flow is None:
            if len(self._flows) >= self.options.max_clients:
                self._evict(min(self._flows.values(), key=lambda f: f.used_s))
            upstream = _udp_socket(self._upstream_family)
            upstream.connect(self._upstream_address)
            flow = _Flow(client, upstream)
            self._flows[client] = flow
            self._sockets[upstream] = flow
        return flow

    def _evict(self, flow: _Flow) -> None:
        del self._flows[flow.client]
        del self._sockets[flow.socket]
        flow.closed = True
        flow.socket.close()
        self._evicted += 1

    def _deliver(self) -> None:
        for direction in (self._forward, self._backward):
            while direction.ring:
                now = time.monotonic()
                due_s, _, flow, data = direction.ring[0]
                if due_s > now:
                    break
                heapq.heappop(direction.ring)
                if flow.closed:
                    direction.orphaned += 1
                    continue
                try:
                    self._write(direction, flow, data)
                except OSError:
                    direction.write_errors += 1
                else:
                    direction.sent += 1
                    direction.lateness.add(now - due_s)

    def _write(self, direction: _Direction, flow: _Flow, data: bytes) -> None:
        if direction is self._backward:
            self._listener.sendto(data, flow.client)
            return
        try:
            flow.socket.send(data)
        except ConnectionError:
            # What the kernel reports here is the fate of an earlier datagram: the server was not there. This one has
            # not been sent, and the report is cleared.
            flow.socket.send(data)

    def _do_epoch(self) -> float:
        # No arrival is stamped later than the present, so both directions take this very time.
        now = time.monotonic()
        self._forward.epoch(now)
        self._backward.epoch(now)
        return now

    def _do_report(self) -> RelayReport:
        link = self._forward.link
        link.advance(self._forward.tick(time.monotonic()))
        return RelayReport(
            options=self.options,
            slot_s=link.slot_s,
            forward=self._forward.report(),
            backward=self._backward.report(),
            log=None if link.epoch_s is None else link.log(),
            clients=len(self._flows),
            evicted=self._evicted,
            real_time=self._real_time,
            kernel_stamps=self._kernel_stamps,
        )

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    # In any thread.

    def _call(self, function: Callable[[], _T]) -> _T:
        """Run `function` in the serving thread and return its result; here, if there is none."""
        future: Future[_T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        if self._failure is not None:
            raise RuntimeError("the relay's thread failed") from self._failure
        with self._lock:
            running = self._running
            if running:
                self._calls.append(call)
        if not running:
            call()
        else:
            self._wake()
        return future.result(_CALL_TIMEOUT_S)

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"\0")
        except OSError:
            return  # closed, or full of wake-ups: either way nobody sleeps

    def _run_kept(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()


def _resolve(address: Address) -> tuple[socket.AddressFamily, Any]:
    """Family and socket address of a host and port."""
    family, _, _, _, sockaddr = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    return family, sockaddr


def _udp_socket(family: socket.AddressFamily) -> socket.socket:
    """A non-blocking socket with deep buffers and kernel time stamps."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.setblocking(False)
    # The kernel grants less where net.core.rmem_max is low; a relay that reads every turn then still keeps up.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return sock


def _kernel_stamp(ancillary: list[tuple[int, int, bytes]]) -> float | None:
    """The arrival time on the wall clock, if the control messages carry it."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(data)
            return float(seconds + nanoseconds * 1e-9)
    return None
