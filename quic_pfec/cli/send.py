"""`quic-pfec send`: prefill here, hand over, and print what the other machine says."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quic_pfec.cli.output import fail, log_to_stderr, need_extra

if TYPE_CHECKING:
    from quic_pfec.client import Connection
    from quic_pfec.kv.auto import WireChoice
    from quic_pfec.kv.layout import Layout
    from quic_pfec.kv.prepared import PreparedKV
    from quic_pfec.llm.models import LoadedModel
    from quic_pfec.report import KVReport

    Packing = Callable[[Callable[[Layout], str]], PreparedKV]
    """Packs the cache, in the wire dtype that is given or in one chosen long before."""

DEFAULT_TOKENS = 512


def send_command(
    host: Annotated[str, typer.Option(help="Where `quic-pfec serve` runs.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Its UDP port.")] = 4433,
    ca_certs: Annotated[
        Path | None, typer.Option(help="PEM file of authorities to trust; for a development server its cert.pem.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Check no certificate. Never outside of a test.")
    ] = False,
    server_name: Annotated[str | None, typer.Option(help="Name in its certificate, if it is not the host.")] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", "-c", help="Ours, PEM, if it asks for one.")
    ] = None,
    private_key: Annotated[
        Path | None, typer.Option("--private-key", "-k", help="The key of --certificate, PEM.")
    ] = None,
    token: Annotated[str | None, typer.Option(envvar="QUIC_PFEC_TOKEN", help="What it asks for.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Text (UTF-8) to prefill. Default: a context made up for it.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the context, default 512. With --file: at most, from its end.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the context that is made up.")] = 1,
    model: Annotated[
        str,
        typer.Option(help="The one the server runs: smollm2-135m, tiny-random, a folder, a .gguf file or a hub id."),
    ] = "smollm2-135m",
    device: Annotated[str, typer.Option(help="Where the model runs here: cpu, cuda, cuda:1 ...")] = "cpu",
    deadline: Annotated[float, typer.Option(help="Seconds from the hand-off to the first new token there.")] = 1.0,
    rate: Annotated[
        str | None, typer.Option(help="Provisioned rate, e.g. 50Mbps, for a path that is known to lose packets.")
    ] = None,
    congestion_control: Annotated[
        str, typer.Option("--congestion-control-algorithm", help="cubic, reno, bbr, or rate (with --rate).")
    ] = "cubic",
    lossy: Annotated[
        bool, typer.Option("--lossy", help="The path is known to lose packets: bbr bears that. Implies bbr.")
    ] = False,
    mtu: Annotated[
        int, typer.Option(help="Of the path, 1248 to 1500 bytes. That of the route counts where it is smaller.")
    ] = 1500,
    scheduler: Annotated[
        str,
        typer.Option(
            help="hybrid (ours), or one to compare with: priorityfec-paper (the paper's design, whose policy is ddqn), "
            "paper-deficit (the same with its heuristic), ddqn-wide, deficit, arq, fixed, none."
        ),
    ] = "hybrid",
    order: Annotated[str, typer.Option(help="Of sending: utility, prefix or fifo.")] = "utility",
    wire_dtype: Annotated[
        str | None,
        typer.Option(
            help="What the cache travels as: bf16, its own dtype, quantised (int8, fp8, int4), progressive (int4, "
            "then refinements), or auto: bf16 if it fits before the deadline, else progressive. Default: auto with "
            "--rate, which says what fits, else bf16, and bf16 for priorityfec-paper."
        ),
    ] = None,
    missing: Annotated[str, typer.Option(help="What the receiver does about holes: mask, zero or recompute.")] = "mask",
    late: Annotated[
        str,
        typer.Option(
            help="What comes after the deadline: drop, or patch it into the cache while the text is generated."
        ),
    ] = "drop",
    repair_budget: Annotated[
        float | None,
        typer.Option(min=0, help="Repairs and resends allowed, a share of the packets. Default: no limit."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="What matters (see `quic-pfec profile`). Default: the model's, if one ships.")
    ] = None,
    score: Annotated[
        str, typer.Option(help="request: what this context's last tokens attend to, weighed with the profile; profile.")
    ] = "request",
    prompt: Annotated[str | None, typer.Option(help="What the receiver continues from, behind the context.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, max=65536, help="Tokens it generates; 0 = none.")] = 64,
    extension: Annotated[bool, typer.Option("--extension/--no-extension", help="Speak the FEC extension.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print text and report as one JSON object.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log to stderr.")] = False,
) -> None:
    """Prefill a context and hand its KV cache to `quic-pfec serve` before a deadline.

    The text that it generates from what came goes to stdout as it comes, the report to stderr. Both ends must run the
    same model.
    """
    if verbose:
        log_to_stderr(logging.DEBUG)
    else:
        logging.getLogger().addHandler(logging.NullHandler())  # what is wrong is said once, in one line
    for path, what in ((ca_certs, "file of authorities"), (certificate, "certificate"), (private_key, "private key"),
                       (file, "text file"), (profile, "profile")):  # fmt: skip
        if path is not None and not path.is_file():
            fail(f"the {what} {path} does not exist")
    if (certificate is None) != (private_key is None):
        fail("--certificate and --private-key go together")
    if order not in ("utility", "prefix", "fifo"):
        fail(f"--order is utility, prefix or fifo, not {order!r}")
    if missing not in ("mask", "zero", "recompute"):
        fail(f"--missing is mask, zero or recompute, not {missing!r}")
    if late not in ("drop", "patch"):
        fail(f"--late is drop or patch, not {late!r}")
    if late == "patch" and (missing == "recompute" or not max_new_tokens):
        fail("--late patch fills holes while tokens are generated: not with --missing recompute or --max-new-tokens 0")
    from quic_pfec.kv.auto import AUTO
    from quic_pfec.schedule.policies import ALIASES
    from quic_pfec.wire.manifest import WIRE_DTYPES

    if wire_dtype is None:
        wire_dtype = "bf16" if rate is None or scheduler in ALIASES else AUTO
    if wire_dtype not in (*WIRE_DTYPES, AUTO):
        fail(f"--wire-dtype is one of {', '.join((*WIRE_DTYPES, AUTO))}, not {wire_dtype!r}")
    if score not in ("request", "profile"):
        fail(f"--score is request or profile, not {score!r}")
    if not 0 < deadline < float("inf"):
        fail(f"--deadline is a number of seconds above 0, not {deadline}")
    with need_extra():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        from quic_pfec.client import Generate, check_scheduler, connect, prepare, send_kv
        from quic_pfec.kv.profile import builtin, load_profile
        from quic_pfec.llm.attention_mass import score_request
        from quic_pfec.llm.corpus import CUE
        from quic_pfec.llm.generate import prefill
        from quic_pfec.llm.models import load
    from quic_pfec.quic.congestion import choose_congestion
    from quic_pfec.quic.outgoing import HandoffRefused
    from quic_pfec.wire.errors import AppCode

    console = Console(stderr=True, quiet=as_json)

    def make_ready() -> tuple[LoadedModel, Packing, float]:
        with need_extra():
            loaded = load(model, device=device)
        ids = context_ids(loaded, file, tokens, seed)
        started_s = time.monotonic()
        with Progress(TextColumn("prefill"), BarColumn(), TextColumn("{task.completed} of {task.total} tokens"),
                      console=console, transient=True, disable=not console.is_terminal) as bars:  # fmt: skip
            task = bars.add_task("prefill", total=len(ids))
            cache = prefill(loaded, ids, progress=lambda done, total: bars.update(task, completed=done))
        prefill_s = time.monotonic() - started_s
        what_matters = (
            load_profile(profile) if profile is not None
            else builtin(loaded.fingerprint, "zero" if missing == "zero" else "mask")
        )  # fmt: skip
        by_request = score == "request" and order == "utility"
        utility = score_request(loaded, cache, ids, what_matters) if by_request else None

        def pack(wire_dtype: str | Callable[[Layout], str]) -> PreparedKV:
            return prepare(
                cache, tokens=ids, profile=None if by_request else what_matters, utility=utility,
                order=order,  # type: ignore[arg-type]  # checked above
                model=loaded.fingerprint, rope=loaded.rope, wire_dtype=wire_dtype,
            )  # fmt: skip

        if wire_dtype == AUTO:
            return loaded, pack, prefill_s
        kv = pack(wire_dtype)
        return loaded, lambda _: kv, prefill_s

    def connection() -> AbstractAsyncContextManager[Connection]:
        return connect(
            host,
            port,
            ca_certs=None if ca_certs is None else str(ca_certs),
            insecure=insecure,
            server_name=server_name,
            client_certificate=None if certificate is None else (str(certificate), str(private_key)),
            token=token,
            congestion_control=congestion_control,
            rate=rate,
            lossy=lossy,
            mtu=mtu,
            extension=extension,
        )

    async def knock() -> None:
        """A wrong port, certificate or token must not cost a prefill. The prefill may outlast an idle connection."""
        async with connection() as conn:
            await conn.authorise()

    async def run(packing: Packing) -> tuple[PreparedKV, WireChoice | None, KVReport, str]:
        request = Generate(CUE if prompt is None else prompt, max_new_tokens=max_new_tokens)
        async with connection() as conn:
            choices: list[WireChoice] = []

            def choose(layout: Layout) -> str:
                choices.append(conn.weigh(layout, deadline))
                return choices[0].wire_dtype

            kv = packing(choose)  # the deadline is one of the hand-off: it starts after this
            report = await send_kv(
                conn, kv, deadline, scheduler=scheduler, repair_budget=repair_budget,
                missing=missing, late=late, then=request if max_new_tokens else None,  # type: ignore[arg-type]
            )  # fmt: skip
            parts = []
            async for part in report.text:
                parts.append(part)
                if not as_json:
                    print(part, end="", flush=True)
            if parts and not as_json:
                print()
            return kv, choices[0] if choices else None, report, "".join(parts)

    try:
        check_scheduler(scheduler)  # a wrong name must not cost a prefill
        choose_congestion(congestion_control, rate, lossy)
        asyncio.run(knock())
        loaded, packing, prefill_s = make_ready()
        kv, choice, report, text = asyncio.run(run(packing))
    except HandoffRefused as error:
        ours = f"; here it is {loaded.name}, --model {model}" if error.code is AppCode.MODEL_MISMATCH else ""
        fail(f"{error}{ours}")
    except (ValueError, OSError) as error:  # ConnectionError is an OSError
        fail(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    if as_json:
        print(json.dumps(figures(report, text, loaded, kv, prefill_s, choice)))
    else:
        sys.stdout.flush()
        for line in summary(report, choice):
            print(line, file=sys.stderr)
    if not report.confirmed:
        fail("no report came from the receiver: how much arrived is not known")


def context_ids(loaded: LoadedModel, file: Path | None, tokens: int | None, seed: int) -> Sequence[int]:
    """Ids of the context: the text's, its last `tokens` if that is given, or `tokens` ids made up.

    Raises ValueError if there is no text, or one that is not UTF-8; OSError if it cannot be read.
    """
    from quic_pfec.llm.corpus import demo_context

    if tokens is not None and tokens > loaded.max_tokens:
        raise ValueError(f"--tokens is at most {loaded.max_tokens}, the positions of {loaded.name}, not {tokens}")
    if file is None:
        return demo_context(loaded.tokenizer, DEFAULT_TOKENS if tokens is None else tokens, seed).ids
    try:
        ids = loaded.encode(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason}") from None
    if not ids:
        raise ValueError(f"{file} is empty")
    return ids if tokens is None else ids[-tokens:]


def summary(report: KVReport, choice: WireChoice | None = None) -> list[str]:
    """The report in a few lines for people; `choice`: of "auto"."""
    symbols = report.symbols
    total = report.units_complete + report.units_partial + report.units_missing
    frozen = "unknown" if report.frozen_s is None else f"{report.frozen_s:.3f} s"
    lines = [
        f"blocks   {report.units_complete} of {total} whole, {report.units_partial} in part;"
        f" utility {report.j_block:.3f} whole, {report.j_frac:.3f} with parts",
        f"frozen   after {frozen}, deadline {report.deadline_s:.3f} s; limited by {report.limited_by}: {report.hint}",
    ]
    if choice is not None:
        lines.append(f"wire     auto chose {choice.wire_dtype}: {choice.reason}")
    elif report.wire_dtype != "bf16":
        lines.append(f"wire     {report.wire_dtype}")
    if report.missing_used not in (None, report.missing):
        lines.append(f"holes    {report.missing_used}: the receiver had no time to {report.missing}")
    if report.patched is not None:
        last = max((step for step, _ in report.patched_before or ()), default=0)
        lines.append(f"late     {report.patched} blocks patched in, the last before pass {last} of the model")
    if report.extension == "on":
        lines.insert(
            1,
            f"packets  {symbols.source} source, {symbols.resent} resent, {symbols.repair} repair"
            f" ({symbols.repairs_useful} useful); {symbols.lost} lost, {symbols.recovered} decoded",
        )
    else:
        lines.insert(1, "packets  over a plain stream: the extension is off")
    if report.congestion_control:
        bears = "" if report.loss_threshold is None else f", which bears {report.loss_threshold:.0%} loss a round trip"
        lines.append(f"rate     kept by {report.congestion_control}{bears}")
    return lines


def figures(
    report: KVReport, text: str, loaded: LoadedModel, kv: PreparedKV, prefill_s: float, choice: WireChoice | None = None
) -> dict[str, Any]:
    """The report and its circumstances, for JSON; `auto` is null unless that chose the wire dtype."""
    return report.as_dict() | {
        "handle": report.handle,
        "hint": report.hint,
        "text": text,
        "finish_reason": report.finish_reason,
        "tokens": kv.layout.context_tokens,
        "wire_bytes": kv.nbytes,
        "saturated": kv.saturated,
        "auto": None if choice is None else asdict(choice) | {"reason": choice.reason},
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
        "profile": kv.profile,
        "prefill_s": prefill_s,
    }
