"""The console script `quic-pfec`. Every command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

try:
    import typer
except ImportError:
    sys.exit('quic-pfec: the command line needs an extra: pip install "quic-pfec[cli]"')

from quic_pfec.cli.commands import (
    cert_command,
    info_command,
    link_command,
    profile_command,
    selftest_command,
    send_command,
)
from quic_pfec.cli.demo_command import demo_command
from quic_pfec.cli.evaluate import evaluate_command
from quic_pfec.cli.serve import serve_command
from quic_pfec.cli.train import train_app

app = typer.Typer(
    name="quic-pfec",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"quic-pfec {version('quic-pfec')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and exit.")
    ] = False,
) -> None:
    """Hand an LLM's KV cache from one machine to another over links that lose packets, before a deadline."""


def _examples(*lines: str) -> str:
    """An epilog of `--help`: a paragraph each, as typer joins the lines of one."""
    return "\n\n".join(("Example:" if len(lines) == 1 else "Examples:", *lines))


app.command("demo", epilog=_examples("quic-pfec demo --point both --json out/demo.json --picture out/demo.png"))(
    demo_command
)
app.command(
    "serve",
    epilog=_examples(
        "quic-pfec serve -c tls/cert.pem -k tls/key.pem",
        "quic-pfec serve -c tls/cert.pem -k tls/key.pem --host 0.0.0.0 --token SECRET --json-log",
    ),
)(serve_command)
app.command(
    "send",
    epilog=_examples(
        "quic-pfec send --ca-certs tls/cert.pem --deadline 2",
        "quic-pfec send --host edge-b --ca-certs cert.pem --token SECRET --rate 50Mbps --file context.txt",
    ),
)(send_command)
app.command("selftest", epilog=_examples("quic-pfec selftest --seed 7"))(selftest_command)
app.command(
    "profile",
    epilog=_examples("quic-pfec profile --receiver mask --out smollm2.json --picture smollm2.png"),
)(profile_command)
app.command(
    "evaluate",
    epilog=_examples(
        "quic-pfec evaluate --point quality --examples 4 --json quality.json --picture quality.png",
        "quic-pfec evaluate --point short --seeds 20 --scheduler hybrid --scheduler arq --json short.json",
    ),
)(evaluate_command)
app.add_typer(train_app, name="train")
app.command("link", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(link_command)
app.command("cert", epilog=_examples("quic-pfec cert tls", "quic-pfec cert tls --name edge-b --name 192.0.2.7"))(
    cert_command
)
app.command("info", epilog=_examples("quic-pfec info --json"))(info_command)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
