"""`quic-pfec send` against an LLM endpoint in this process, and every way in which it can fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("torch")
pytest.importorskip("transformers")

from quic_pfec.cli.cert import make_certificate
from quic_pfec.cli.main import app
from quic_pfec.cli.send import summary
from quic_pfec.kv.profile import Profile, save_profile
from quic_pfec.kv.received import ReceivedKV
from quic_pfec.llm.endpoint import LLMHandler
from quic_pfec.llm.generate import greedy, prefill
from quic_pfec.llm.models import LoadedModel, tiny
from quic_pfec.server import serve
from tests.test_cli_selftest import handoff

pytestmark = [pytest.mark.model, pytest.mark.sockets]

PATIENCE_S = "30"  # a deadline that nothing here should need


@dataclass(eq=False)
class Endpoint:
    """A server for the tiny model, and what it received."""

    model: LoadedModel
    port: int
    certificate: Path
    received: list[ReceivedKV]

    async def send(self, *arguments: str | Path, model: str = "tiny-random", token: str = "secret") -> Result:
        """Runs the command in a thread, beside the server's event loop."""
        common = ["--port", self.port, "--ca-certs", self.certificate, "--token", token, "--model", model]
        return await send(*common, "--deadline", PATIENCE_S, *arguments)


async def send(*arguments: str | Path | int) -> Result:
    words = ["send", *(str(argument) for argument in arguments)]
    return await asyncio.to_thread(CliRunner().invoke, app, words)


async def failure(*arguments: str | Path | int) -> str:
    return one_line(await send(*arguments))


def one_line(result: Result) -> str:
    """What a command that failed said: exactly one line."""
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("quic-pfec: ")
    return lines[0]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny()


@pytest.fixture
async def endpoint(model: LoadedModel, tmp_path: Path) -> AsyncIterator[Endpoint]:
    certificate, key = make_certificate(tmp_path / "tls")
    received: list[ReceivedKV] = []
    handler = LLMHandler(model, token="secret", on_received=received.append)
    async with await serve(port=0, certificate=str(certificate), private_key=str(key), handler=handler) as listener:
        yield Endpoint(model, listener.port, certificate, received)
    handler.close()


def expected(model: LoadedModel, context: list[int], prompt: str, count: int) -> str:
    return model.decode(list(greedy(model, prefill(model, context), model.encode(prompt), count)))


async def test_text_goes_to_stdout_and_the_report_to_stderr(endpoint: Endpoint, tmp_path: Path) -> None:
    text = "The harbour master counts the boats twice. " * 5
    (tmp_path / "context.txt").write_text(text, encoding="utf-8")
    result = await endpoint.send("--file", tmp_path / "context.txt", "--prompt", "So ", "--max-new-tokens", "12")
    assert result.exit_code == 0, result.output
    # bf16 on the wire, fp32 here: the first bytes agree, and no more is claimed for random weights
    said = expected(endpoint.model, endpoint.model.encode(text), "So ", 12)
    assert result.stdout.startswith(said[:2])
    assert "blocks   56 of 56 whole" in result.stderr
    assert "deadline 30.000 s; limited by nothing" in result.stderr
    [received] = endpoint.received
    assert received.is_complete
    assert received.manifest.tokens == len(text)
    assert received.manifest.model == endpoint.model.fingerprint


async def test_json_has_everything(endpoint: Endpoint, tmp_path: Path) -> None:
    flat = Profile(
        model="tiny-random:0",
        receiver="zero",
        layers=4,
        bins=2,
        values=((1.0, 2.0),) * 4,
        data="none",
        context_tokens=8,
        seed=0,
        command="none",
        versions={},
    )
    save_profile(flat, tmp_path / "flat.json")
    result = await endpoint.send(
        "--tokens", "100", "--seed", "3", "--max-new-tokens", "5", "--rate", "100Mbps", "--missing", "zero",
        "--order", "prefix", "--scheduler", "fixed", "--repair-budget", "0.1", "--json",
        "--profile", tmp_path / "flat.json", "--late", "patch",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    values = json.loads(result.stdout)
    assert (values["late"], values["patched"]) == ("patch", None)  # all of it came in time
    assert values["j_block"] == pytest.approx(1.0)
    assert values["blocks_complete"] == values["blocks_total"] == 28
    assert values["tokens"] == 100
    assert (values["scheduler"], values["extension"], values["profile"]) == ("fixed", "on", flat.id)
    assert values["finish_reason"] == "length"
    assert values["text"]
    assert values["repair"] <= 0.1 * values["symbols"]
    [received] = endpoint.received
    assert received.handle == values["handle"]
    assert (received.manifest.missing, received.manifest.order) == ("zero", "prefix")


async def test_a_file_is_cut_at_its_front(endpoint: Endpoint, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 300 + "the end of it all", encoding="utf-8")
    result = await endpoint.send("--file", tmp_path / "long.txt", "--tokens", "17", "--max-new-tokens", "0")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    cache = prefill(endpoint.model, endpoint.model.encode("the end of it all"))
    keys = cache.layers[0].keys[0].bfloat16().float().numpy()
    got, _ = endpoint.received[0].kv.arrays.convert("fp32").layers[0]
    np.testing.assert_array_equal(got.view(np.float32), keys)


async def test_without_the_extension(endpoint: Endpoint) -> None:
    result = await endpoint.send("--tokens", "100", "--no-extension", "--max-new-tokens", "3")
    assert result.exit_code == 0, result.output
    assert "plain stream" in result.stderr
    assert endpoint.received[0].is_complete


@pytest.mark.parametrize("asked", [(), ("--wire-dtype", "auto")])
async def test_auto_chooses_once_it_knows_the_link_and_says_why(asked: tuple[str, ...], endpoint: Endpoint) -> None:
    common = ("--tokens", "100", "--max-new-tokens", "0", *asked)
    result = await endpoint.send(*common, "--rate", "100Mbps")
    assert result.exit_code == 0, result.output
    assert "wire     auto chose bf16: bf16 needs" in result.stderr
    # 205 kB in bf16 take 0.9 s at this rate.
    result = await endpoint.send(*common, "--rate", "2Mbps", "--deadline", "0.5", "--json")
    values = json.loads(result.stdout)
    assert values["wire_dtype"] == values["auto"]["wire_dtype"] == "progressive"
    assert values["auto"]["needed_s"] > values["auto"]["remaining_s"] > 0
    assert "that does not fit" in values["auto"]["reason"]
    assert endpoint.received[0].manifest.wire_dtype == "bf16"


async def test_without_a_rate_the_default_rounds_no_further_than_bf16(endpoint: Endpoint) -> None:
    result = await endpoint.send("--tokens", "100", "--max-new-tokens", "0", "--deadline", "0.2", "--json")
    values = json.loads(result.stdout)
    assert (values["wire_dtype"], values["auto"]) == ("bf16", None)


async def test_a_wire_dtype_that_is_named_is_taken(endpoint: Endpoint) -> None:
    result = await endpoint.send("--tokens", "100", "--max-new-tokens", "0", "--wire-dtype", "progressive")
    assert result.exit_code == 0, result.output
    assert "wire     progressive" in result.stderr
    assert "blocks   56 of 56 whole" in result.stderr  # units: a base and a refinement of each block
    [received] = endpoint.received
    assert received.manifest.wire_dtype == "progressive"


async def test_refusals_are_one_line(endpoint: Endpoint) -> None:
    short = ("--tokens", "100", "--max-new-tokens", "3")
    assert "unauthorized): the token is missing or wrong" in one_line(await endpoint.send(*short, token="guess"))
    mismatch = one_line(await endpoint.send(*short, model="tiny-random:1"))
    assert f"model_mismatch): this endpoint runs tiny-random:0 ({endpoint.model.fingerprint})" in mismatch
    assert "here it is tiny-random:1" in mismatch
    assert "needs a prompt" in one_line(await endpoint.send("--tokens", "100", "--prompt", ""))
    assert (await endpoint.send(*short)).exit_code == 0  # it keeps serving


async def test_untrusted_certificate(endpoint: Endpoint) -> None:
    arguments = ("--port", endpoint.port, "--model", "tiny-random", "--token", "secret", "--tokens", "100")
    assert "self-signed" in await failure(*arguments)
    result = await send(*arguments, "--insecure", "--deadline", PATIENCE_S, "--max-new-tokens", "2")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--deadline", "0"), "deadline"),
        (("--deadline", "nan"), "deadline"),
        (("--order", "random"), "utility, prefix or fifo"),
        (("--late", "mend"), "drop or patch"),
        (("--late", "patch", "--missing", "recompute"), "while tokens are generated"),
        (("--late", "patch", "--max-new-tokens", "0"), "while tokens are generated"),
        (("--missing", "guess"), "mask, zero or recompute"),
        (("--wire-dtype", "int3"), "progressive, auto, not 'int3'"),
        (("--scheduler", "magic"), "choose one of"),
        (("--rate", "5 furlongs"), "rate"),
        (("--rate", "5Mbps", "--congestion-control-algorithm", "reno"), "rate"),
        (("--certificate", "none.pem"), "none.pem does not exist"),
        (("--ca-certs", "none.pem"), "none.pem does not exist"),
        (("--file", "none.txt"), "none.txt does not exist"),
        (("--profile", "none.json"), "none.json does not exist"),
        (("--scheduler", "priorityfec"), "ddqn is the paper's design"),
    ],
)
async def test_mistakes_are_one_line(arguments: tuple[str, ...], said: str) -> None:
    assert said in await failure("--model", "tiny-random", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "none.gguf"), "no such GGUF"),
        (("--model", "smolm2"), "choose smollm2-135m, tiny-random"),
        (("--tokens", "20"), "no room"),
    ],
)
async def test_mistakes_in_what_is_prefilled_are_one_line(
    endpoint: Endpoint, arguments: tuple[str, ...], said: str
) -> None:
    model = () if "--model" in arguments else ("--model", "tiny-random")
    common = ("--port", endpoint.port, "--ca-certs", endpoint.certificate, "--token", "secret")
    assert said in await failure(*common, *model, *arguments)


async def test_nothing_is_prefilled_for_a_server_that_cannot_be_reached_or_does_not_want_it(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("quic_pfec.llm.models.load", lambda *_, **__: pytest.fail("loaded a model"))
    other, _ = make_certificate(tmp_path / "other")
    assert "no answer from 127.0.0.1 port 9 (UDP)" in await failure("--port", "9", "--ca-certs", endpoint.certificate)
    assert "there is no host" in await failure("--host", "no.such.host.invalid")
    assert "(--ca-certs)" in await failure("--port", endpoint.port, "--ca-certs", other)
    assert "unauthorized" in one_line(await endpoint.send(token="guess"))
    assert endpoint.received == []


async def test_files_that_are_not_what_they_should_be(endpoint: Endpoint, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("größe".encode("latin-1"))
    (tmp_path / "empty").write_bytes(b"")
    there = ("--port", endpoint.port, "--ca-certs", endpoint.certificate, "--token", "secret")
    common = ("--model", "tiny-random", *there)
    assert "not UTF-8" in await failure(*common, "--file", tmp_path / "latin")
    assert "is empty" in await failure(*common, "--file", tmp_path / "empty")
    assert "not a profile" in await failure(*common, "--tokens", "100", "--profile", tmp_path / "empty")
    assert "go together" in await failure(*common, "--certificate", tmp_path / "latin")


async def test_numbers_out_of_range_are_usage_errors() -> None:
    for arguments in (("--port", "0"), ("--tokens", "0"), ("--max-new-tokens", "-1"), ("--repair-budget", "-0.1")):
        result = await send(*arguments)
        assert result.exit_code == 2
        assert arguments[0] in result.stderr


def test_the_summary_says_what_late_repair_did() -> None:
    _, report, _ = handoff()
    assert not any(line.startswith("late") for line in summary(report))
    report.late, report.patched_before = "patch", ((0, 2), (9, 5))
    assert "late     7 blocks patched in, the last before pass 9 of the model" in summary(report)
