"""The console script `quic-pfec`. Every command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import sys

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

app = typer.Typer(
    name="quic-pfec",
    help="Hand an LLM's KV cache from one machine to another over links that lose packets, before a deadline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command("demo")(demo_command)
app.command("serve")(serve_command)
app.command("send")(send_command)
app.command("selftest")(selftest_command)
app.command("profile")(profile_command)
app.command("evaluate")(evaluate_command)
app.command("link", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(link_command)
app.command("cert")(cert_command)
app.command("info")(info_command)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
