"""`quic-pfec serve` as a process: ready when it says so, ended by a signal, one line when it cannot start."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from quic_pfec.cli.cert import make_certificate
from quic_pfec.cli.main import app
from quic_pfec.cli.processes import ServerProcess
from quic_pfec.client import Generate, connect, prepare, send_kv
from quic_pfec.llm.generate import prefill
from quic_pfec.llm.models import tiny

pytestmark = [pytest.mark.model, pytest.mark.sockets]


@pytest.mark.slow
async def test_serves_until_it_is_stopped(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with ServerProcess(certificate, key, "--model", "tiny-random:4", "--require-fingerprint", "--json-log") as server:
        server.wait_ready()
        model = tiny(4)
        assert server.fingerprint == model.fingerprint
        cache = prefill(model, model.encode("a context that somebody else goes on with"))
        async with connect("127.0.0.1", server.port, ca_certs=str(certificate)) as conn:
            kv = prepare(cache, model=model.fingerprint)
            report = await send_kv(conn, kv, 30.0, then=Generate(" and", max_new_tokens=4))
            assert len([part async for part in report.text]) > 0
            assert report.finish_reason == "length"
            assert report.units_complete == kv.layout.unit_count
        said: dict[str, Any] = {}
        async with asyncio.timeout(20):
            while said.get("outcome") != "complete":
                await asyncio.sleep(0.05)
                words = server.last_words()
                said = json.loads(words) if words.startswith("{") else {}
        assert said["model"] == model.fingerprint
        assert said["blocks_complete"] == said["blocks_total"] == kv.layout.unit_count
        assert said["generated"] == 4


@pytest.mark.slow
def test_a_signal_ends_it_in_order(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    command = [sys.executable, "-m", "quic_pfec.server", "--model", "tiny-random", "--port", "0"]
    with subprocess.Popen(
        [*command, "-c", str(certificate), "-k", str(key), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert '"ready": true' in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""


def test_failures_are_one_line(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)

    def failure(*arguments: str | Path) -> str:
        result = CliRunner().invoke(app, ["serve", *(str(argument) for argument in arguments)])
        assert result.exit_code == 1, result.output
        assert len(result.stderr.splitlines()) == 1
        return result.stderr

    assert "quic-pfec cert" in failure("-c", tmp_path / "none.pem", "-k", key)
    tls = ("-c", certificate, "-k", key, "--model", "tiny-random", "--port", "0")
    assert "no such GGUF" in failure("-c", certificate, "-k", key, "--model", "none.gguf")
    assert "rate" in failure(*tls, "--congestion-control-algorithm", "rate")
    assert "host" in failure(*tls, "--host", "192.0.2.1") or "assign" in failure(*tls, "--host", "192.0.2.1")
