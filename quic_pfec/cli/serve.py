"""`quic-pfec serve`, which is also `python -m quic_pfec.server`: the LLM endpoint."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from quic_pfec.cli.output import fail, log_to_stderr, need_extra

SWITCH_INTERVAL_S = 0.0005


def serve_command(
    certificate: Annotated[
        Path, typer.Option("--certificate", "-c", help="TLS certificate, PEM (see `quic-pfec cert`).")
    ],
    private_key: Annotated[Path, typer.Option("--private-key", "-k", help="Its private key, PEM.")],
    model: Annotated[
        str, typer.Option(help="smollm2-135m, tiny-random, a folder, a .gguf file or a hub id.")
    ] = "smollm2-135m",
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1 ...")] = "cpu",
    host: Annotated[
        str, typer.Option(help="Address to bind. The default takes no connections from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="UDP port; 0 lets the system choose.")] = 4433,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Compute threads of one hand-off; fewer leave cores to the network.")
    ] = None,
    token: Annotated[str | None, typer.Option(envvar="QUIC_PFEC_TOKEN", help="What senders must present.")] = None,
    client_ca: Annotated[Path | None, typer.Option(help="PEM file: senders need a certificate that it signed.")] = None,
    max_transfers: Annotated[int, typer.Option(min=1, help="Hand-offs at once; beyond it senders hear `busy`.")] = 8,
    max_gb: Annotated[float, typer.Option(min=0.001, help="Memory of hand-offs under way, GB.")] = 8.0,
    handle_ttl_s: Annotated[
        float, typer.Option(min=0, help="How long a cache is kept for later turns, seconds.")
    ] = 300.0,
    handle_gb: Annotated[float, typer.Option(min=0, help="Memory of kept caches, GB.")] = 4.0,
    require_fingerprint: Annotated[bool, typer.Option(help="Refuse caches that do not name their model.")] = False,
    recompute_budget: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds after its deadline that decoding may wait for rows to be recomputed, where asked for."
            " Default: as long as the deadline gave the hand-off.",
        ),
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Provisioned rate of what this side sends, e.g. 50Mbps.")] = None,
    congestion_control: Annotated[
        str, typer.Option("--congestion-control-algorithm", help="cubic, reno, bbr, or rate (with --rate).")
    ] = "cubic",
    lossy: Annotated[
        bool, typer.Option("--lossy", help="The path is known to lose packets: bbr bears that. Implies bbr.")
    ] = False,
    mtu: Annotated[
        int, typer.Option(help="Of the path, 1248 to 1500 bytes. That of the route counts where it is smaller.")
    ] = 1500,
    extension: Annotated[bool, typer.Option("--extension/--no-extension", help="Speak the FEC extension.")] = True,
    retry: Annotated[
        bool, typer.Option("--stateless-retry", "-r", help="Validate addresses with a Retry packet.")
    ] = False,
    quic_log: Annotated[Path | None, typer.Option("--quic-log", "-q", help="Folder for qlog files.")] = None,
    secrets_log: Annotated[
        Path | None, typer.Option("--secrets-log", "-l", help="File for TLS secrets; for debugging only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say on stdout, in one JSON line, when it is ready.")] = False,
    json_log: Annotated[bool, typer.Option("--json-log", help="Log in JSON, an object a line, on stderr.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log packets and events too, not only each hand-off.")
    ] = False,
) -> None:
    """Take KV caches from other machines and continue from what arrived by the deadline.

    Binds 127.0.0.1 unless told otherwise; TLS 1.3 always. Stop it with Ctrl-C. Each hand-off is one line of the log
    (stderr): who sent it, how much came, how long it took, or why it was refused; never what was said.
    """
    log_to_stderr(logging.DEBUG if verbose else logging.INFO, as_json=json_log)
    logging.getLogger("quic").setLevel(logging.DEBUG if verbose else logging.WARNING)
    for path, what in ((certificate, "certificate"), (private_key, "private key"), (client_ca, "client CA")):
        if path is not None and not path.is_file():
            fail(f"the {what} {path} does not exist: `quic-pfec cert` makes one for development")
    with need_extra():
        from quic_pfec.llm.endpoint import Conversation, LLMHandler
        from quic_pfec.llm.models import load
    from quic_pfec.quic.admission import Admissions, HandleStore
    from quic_pfec.server import serve

    with need_extra():
        try:
            loaded = load(model, device=device, threads=threads)
        except (ValueError, OSError) as error:
            fail(str(error))
    handles: HandleStore[Conversation] = HandleStore(handle_ttl_s, int(handle_gb * 1e9))
    try:
        handler = LLMHandler(
            loaded,
            token=token,
            admissions=Admissions(max_transfers, int(max_gb * 1e9)),
            handles=handles,
            require_fingerprint=require_fingerprint,
            recompute_budget_s=recompute_budget,
        )
    except ValueError as error:
        fail(str(error))

    handler.warm_up()
    # What stands now stays: torch alone is some hundred thousand objects, which a collection between freeze and first
    # token would otherwise walk.
    gc.collect()
    gc.freeze()
    # A worker that decodes shares the interpreter with the event loop: it must not wait 5 ms for its turn.
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    async def run() -> None:
        listener = await serve(
            host,
            port,
            certificate=str(certificate),
            private_key=str(private_key),
            handler=handler,
            client_ca=None if client_ca is None else str(client_ca),
            congestion_control=congestion_control,
            rate=rate,
            lossy=lossy,
            mtu=mtu,
            extension=extension,
            retry=retry,
            secrets_log=None if secrets_log is None else str(secrets_log),
            quic_log=None if quic_log is None else str(quic_log),
        )
        stop = asyncio.Event()
        for name in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError):
                asyncio.get_running_loop().add_signal_handler(name, stop.set)
        if as_json:
            ready = {"ready": True, "port": listener.port, "model": loaded.name, "fingerprint": loaded.fingerprint}
            print(json.dumps(ready), flush=True)
        else:
            print(f"ready: {loaded.name} ({loaded.fingerprint}) on {host}:{listener.port}", file=sys.stderr, flush=True)
        while not stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 5.0)
            handles.sweep(time.monotonic())
        listener.close()
        await listener.wait_closed()
        handler.close()

    try:
        asyncio.run(run())
    except (ValueError, OSError) as error:
        fail(str(error))


def main() -> None:
    """`python -m quic_pfec.server`."""
    typer.run(serve_command)
