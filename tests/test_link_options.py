"""The relay's settings: the command line and the object say the same, and both refuse nonsense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quic_pfec.link.options import RelayOptions, build_parser, format_address, options_from, parse_address
from quic_pfec.sim.channel import PRESETS, GilbertElliottChannel, direction_seed, losses
from quic_pfec.sim.link import Link

UPSTREAM = ("127.0.0.1", 4433)


def parsed(*arguments: str) -> RelayOptions:
    return options_from(build_parser().parse_args(["--upstream", "127.0.0.1:4433", *arguments]))


def sequence(link: Link, count: int) -> list[bool]:
    link.epoch(0.0)
    link.advance((count - 0.5) * link.slot_s)
    return link.log().losses.tolist()


def test_defaults_are_the_same_on_the_command_line() -> None:
    assert parsed() == RelayOptions(UPSTREAM)


def test_every_argument_reaches_its_option() -> None:
    options = parsed(
        *[
            "--listen",
            ":9",
            "--rate",
            "5Mbps",
            "--owd-ms",
            "125",
            "--queue-bytes",
            "99",
            "--ge",
            "paper",
            "--loss",
            "both",
            "--clock",
            "packet",
        ],
        *[
            "--slot-us",
            "500",
            "--seed",
            "7",
            "--loss-from-start",
            "--corrupt",
            "0.1",
            "--reorder",
            "0.2",
            "--reorder-ms",
            "3",
        ],
        *["--max-clients", "3", "--fifo"],
    )
    assert options == RelayOptions(
        upstream=UPSTREAM,
        listen=("127.0.0.1", 9),
        rate_bps=5e6,
        owd_s=0.125,
        queue_bytes=99,
        loss=PRESETS["paper"],
        loss_both=True,
        clock="packet",
        slot_s=500e-6,
        seed=7,
        loss_from_start=True,
        corrupt=0.1,
        reorder=0.2,
        reorder_s=0.003,
        max_clients=3,
        fifo=True,
    )


@pytest.mark.parametrize(
    "options",
    [
        RelayOptions(UPSTREAM),
        RelayOptions(("::1", 1), rate_bps=12_345_678.0, owd_s=0.125, loss=PRESETS["long8"], loss_both=True, fifo=True),
        RelayOptions(UPSTREAM, trace="x y.csv", queue_bytes=5000, slot_s=0.0005, clock="packet", loss_from_start=True),
    ],
)
def test_command_line_and_json_round_trip(options: RelayOptions) -> None:
    assert options_from(build_parser().parse_args(options.to_arguments())) == options
    again = RelayOptions.from_json(json.loads(json.dumps(options.to_json())))
    assert again.to_json() == options.to_json()


def test_json_fills_in_what_depends_on_the_rate() -> None:
    values = RelayOptions(UPSTREAM, rate_bps=100e6).to_json()
    assert values["slot_s"] == pytest.approx(115.2e-6)
    assert values["queue_bytes"] == 250_000


def test_each_direction_has_its_own_losses() -> None:
    forward, backward = RelayOptions(UPSTREAM, loss=PRESETS["paper"], loss_both=True, seed=5).links()
    for direction, link in enumerate((forward, backward)):
        channel = GilbertElliottChannel(PRESETS["paper"], direction_seed(5, direction))
        assert sequence(link, 2000) == losses(channel, 2000).tolist()


def test_one_way_loss_spares_the_way_back() -> None:
    forward, backward = RelayOptions(UPSTREAM, loss=PRESETS["paper"]).links()
    assert any(sequence(forward, 2000))
    assert not any(sequence(backward, 2000))


def test_trace_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("0010", encoding="utf-8")
    forward, _ = RelayOptions(UPSTREAM, trace=str(path)).links()
    assert sequence(forward, 6) == [False, False, True, False, False, False]
    with pytest.raises(OSError):
        RelayOptions(UPSTREAM, trace=str(tmp_path / "none")).links()


@pytest.mark.parametrize(
    ("text", "address"),
    [("host:1", ("host", 1)), (":4433", UPSTREAM), ("[::1]:65535", ("::1", 65535)), ("127.0.0.1:0", ("127.0.0.1", 0))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert parse_address(format_address(address)) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "host:65536", "::1:443", "host:-1"])
def test_addresses_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rate", "quick"],
        ["--owd-ms", "-1"],
        ["--ge", "papers"],
        ["--corrupt", "2"],
        ["--max-clients", "0"],
        ["--max-clients", "501"],
        ["--slot-us", "soon"],
        ["--slot-us", "0"],
    ],
)
def test_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError):
        parsed(*arguments)


def test_one_channel_only() -> None:
    with pytest.raises(ValueError, match="one channel"):
        RelayOptions(UPSTREAM, loss=PRESETS["paper"], trace="file")
    with pytest.raises(SystemExit):
        parsed("--ge", "paper", "--trace", "file")


def test_help_teaches_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in ("epoch", "report", "quit", "paper", "examples:"))
