"""Random hand-offs to one server until something hangs, leaks or breaks: `python -m bench.soak --json F`.

A real server process with a tiny model of random weights, a lossy relay before it, and clients that do all that clients
may do: every wire dtype, receiver and scheduler, late repair, later turns, plain streams, small MTUs, deadlines too
short for anything; one in ten gives up in the middle, one in ten vanishes without a word, one in ten reads no answer.

It fails (exit status 1) when an answer does not come within 15 s, a unit arrives corrupt, a recovered symbol is not the
one sent, the server ends or logs an error of its own, or holds more descriptors at the end than at the start. Memory is
reported, not judged: the second half of a run should add little to the first, as caches are kept for 5 s only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quic_pfec import Generate, HandoffRefused, connect, prepare, send_kv
from quic_pfec.cli.demo import temporary_certificate
from quic_pfec.cli.processes import ServerProcess
from quic_pfec.link.options import RelayOptions
from quic_pfec.link.process import RelayProcess
from quic_pfec.llm.generate import prefill
from quic_pfec.llm.models import load
from quic_pfec.sim.channel import PRESETS
from quic_pfec.wire.manifest import QUANTISED

MODEL = "tiny-random"
TOKENS = 300
RELAY_BPS = 8e6
ANSWER_S = 15.0  # longer than any deadline here and three probe timeouts: what has not come by then will not
KEPT_S = 5.0
IDLE_S = 35.0  # the idle timeout of the connections that vanished, and some
SCHEDULERS = ("hybrid", "priorityfec-paper", "arq", "deficit", "fixed", "flec-rt", "ddqn-wide")


@dataclass(frozen=True, slots=True)
class State:
    """Of the server's process (Linux)."""

    handoffs: int
    wall_s: float
    rss_mb: int
    descriptors: int
    threads: int


def state_of(pid: int, handoffs: int, begun_s: float) -> State:
    process = Path(f"/proc/{pid}")
    rss_kb = next(int(line.split()[1]) for line in (process / "status").read_text().splitlines() if "VmRSS" in line)
    return State(
        handoffs,
        round(time.monotonic() - begun_s, 1),
        rss_kb // 1024,
        len(list((process / "fd").iterdir())),
        len(list((process / "task").iterdir())),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """One client, drawn from the seed: options of `connect` and `send_kv`, and how it behaves."""

    relayed: bool
    connection: dict[str, Any]
    prepared: bool
    wire_dtype: str | None
    handoff: dict[str, Any]
    deadline_s: float
    new_tokens: int
    behaviour: str  # "reads", "reads and asks again", "cancels", "vanishes", "leaves"
    after_s: float

    @classmethod
    def draw(cls, rng: random.Random) -> Plan:
        connection: dict[str, Any] = {"extension": rng.random() > 0.1}
        if rng.random() < 0.7:
            connection["rate"] = rng.choice(["2Mbps", "8Mbps", "20Mbps"])
        elif rng.random() < 0.5:
            connection["lossy"] = True
        if rng.random() < 0.3:
            connection["mtu"] = rng.choice([1248, 1280, 1400])
        late = rng.random() < 0.4
        prepared = rng.random() < 0.5
        deadline_s = rng.choice([0.05, 0.15, 0.4, 1.0])
        behaviours = ("cancels", "vanishes", "leaves", "reads and asks again", *["reads"] * 6)
        return cls(
            relayed=rng.random() < 0.7,
            connection=connection,
            prepared=prepared,
            wire_dtype=rng.choice([None, "bf16", *QUANTISED, *([] if prepared else ["auto"])]),
            handoff={
                "late": "patch" if late else "drop",
                "missing": rng.choice(["mask", "zero"] if late else ["mask", "zero", "recompute"]),
                "scheduler": rng.choice(SCHEDULERS),
            },
            deadline_s=deadline_s,
            new_tokens=rng.choice([1, 8, 30]),
            behaviour=rng.choice(behaviours),
            after_s=rng.random() * deadline_s,
        )


class Soak:
    """Clients of one server; `outcomes` counts what became of them, `faults` is what must not happen."""

    def __init__(self, ca_certs: str, direct_port: int, relayed_port: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self._ca_certs = ca_certs
        self._ports = (direct_port, relayed_port)
        self._model = load(MODEL)
        self._ids = [index % 97 + 3 for index in range(TOKENS)]
        self._cache = prefill(self._model, self._ids)

    async def client(self, plan: Plan) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                outcome = await self._behave(plan)
        except HandoffRefused as error:
            outcome = f"refused: {error.code.name.lower()}"
        except TimeoutError:
            outcome = "no answer"
            self.faults.append(f"no answer after {ANSWER_S:.0f} s: {plan}")
        except (ConnectionError, ValueError) as error:
            outcome = type(error).__name__
            self.faults.append(f"{error!r}: {plan}")
        self.outcomes[outcome] += 1

    async def _behave(self, plan: Plan) -> str:
        port = self._ports[plan.relayed]
        options = plan.connection | {"ca_certs": self._ca_certs, "server_name": "localhost"}
        async with connect("127.0.0.1", port, **options) as conn:
            cache, more = self._cache, dict(plan.handoff)
            wire = {} if plan.wire_dtype is None else {"wire_dtype": plan.wire_dtype}
            if plan.prepared:
                cache = prepare(cache, tokens=self._ids, model=self._model.fingerprint, **wire)
            else:
                more |= {"tokens": self._ids} | wire
            request = Generate("And so", max_new_tokens=plan.new_tokens)
            handing = asyncio.ensure_future(send_kv(conn, cache, plan.deadline_s, then=request, **more))
            if plan.behaviour in ("cancels", "vanishes"):
                await asyncio.sleep(plan.after_s)
                if plan.behaviour == "vanishes":
                    conn.protocol.abandon()
                handing.cancel()
                with suppress(asyncio.CancelledError, ConnectionError, HandoffRefused):
                    await handing
                return plan.behaviour
            report = await handing
            if report.units_corrupt:
                self.faults.append(f"{report.units_corrupt} corrupt units: {plan}")
            if report.recovered_verified is False:
                self.faults.append(f"a recovered symbol is another than the one sent: {plan}")
            if plan.behaviour == "leaves":
                return plan.behaviour
            async for _ in report.text:
                pass
            if plan.behaviour == "reads and asks again" and report.handle:
                await (await conn.generate(report.handle, Generate("Then", max_new_tokens=4))).whole()
            if not report.confirmed:
                return "no report"
            return "complete" if report.units_partial + report.units_missing == 0 else "partial"


def run(handoffs: int, clients: int, seed: int, console: Console) -> dict[str, Any]:
    folder, certificate, key = temporary_certificate()
    rng = random.Random(seed)
    with folder, ServerProcess(
        certificate, key, "--model", MODEL, "--handle-ttl-s", str(KEPT_S), "--max-transfers", str(2 * clients)
    ) as server:  # fmt: skip
        server.wait_ready()
        options = RelayOptions(("127.0.0.1", server.port), rate_bps=RELAY_BPS, loss=PRESETS["paper"], seed=seed,
                               loss_from_start=True)  # fmt: skip
        with RelayProcess(options) as relay:
            soak = Soak(str(certificate), server.port, relay.port)
            begun_s = time.monotonic()
            states = [state_of(server.pid, 0, begun_s)]

            async def all_of_them() -> None:
                done = 0
                while done < handoffs:
                    batch = min(clients, handoffs - done)
                    await asyncio.gather(*(soak.client(Plan.draw(rng)) for _ in range(batch)))
                    done += batch
                    if done >= handoffs or done * 8 // handoffs > (done - batch) * 8 // handoffs:
                        states.append(state_of(server.pid, done, begun_s))
                        console.print(f"{done} of {handoffs}: {states[-1].rss_mb} MB, {dict(soak.outcomes)}")
                await asyncio.sleep(IDLE_S)

            try:
                asyncio.run(all_of_them())
                states.append(state_of(server.pid, handoffs, begun_s))
            except FileNotFoundError:
                soak.faults.append(f"the server ended: {server.last_words()}")
        if states[-1].descriptors > states[0].descriptors:
            soak.faults.append(f"descriptors grew from {states[0].descriptors} to {states[-1].descriptors}")
        soak.faults += [f"the server logged: {line}" for line in server.log() if "internal error" in line]
    return {
        "outcomes": dict(soak.outcomes),
        "faults": soak.faults,
        "states": [asdict(state) for state in states],
        "settings": {
            "command": " ".join(sys.argv), "handoffs": handoffs, "clients": clients, "seed": seed, "model": MODEL,
            "tokens": TOKENS, "python": platform.python_version(),
            "versions": {name: version(name) for name in ("quic-pfec", "aioquic", "torch")},
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--handoffs", type=int, default=360, help="default %(default)s: about two minutes")
    parser.add_argument("--clients", type=int, default=6, help="at once (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write outcomes, faults and the server's states here")
    options = parser.parse_args()
    found = run(options.handoffs, options.clients, options.seed, Console(stderr=True))
    table = Table(
        "hand-offs", "after s", "memory MB", "descriptors", "threads", title="the server", title_justify="left"
    )
    for state in found["states"]:
        table.add_row(*(str(value) for value in state.values()))
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    for outcome, count in sorted(found["outcomes"].items(), key=lambda item: -item[1]):
        console.print(f"{count:>6}  {outcome}")
    for fault in found["faults"]:
        print(f"FAULT   {fault}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
