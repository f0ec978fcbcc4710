"""Settings of the bottleneck between namespaces: the command line and the object say the same, and refuse nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quic_pfec.link.emulator import c_arguments
from quic_pfec.link.tun_command import build_parser, options_from
from quic_pfec.link.tun_options import TunOptions
from quic_pfec.sim.channel import PRESETS, GilbertElliott


def parsed(*arguments: str) -> TunOptions:
    return options_from(build_parser().parse_args(arguments))


def test_defaults_are_the_same_on_the_command_line() -> None:
    assert parsed() == TunOptions()


def test_every_argument_reaches_its_option() -> None:
    words = """--rate 50Mbps --owd-ms 7 --queue-bytes 99000 --ge 0.1,0.2,0.3,0.4 --loss both --clock packet
        --slot-us 112 --seed 9 --corrupt 0.1 --reorder 0.2 --reorder-ms 3 --mtu 1400 --no-fifo --emulator python
        --paced"""
    assert parsed(*words.split()) == TunOptions(
        rate_bps=50e6,
        owd_s=0.007,
        queue_bytes=99_000,
        loss=GilbertElliott(0.1, 0.2, 0.3, 0.4),
        loss_both=True,
        clock="packet",
        slot_s=112e-6,
        seed=9,
        corrupt=0.1,
        reorder=0.2,
        reorder_s=0.003,
        mtu=1400,
        fifo=False,
        program="python",
        paced=True,
    )


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--help"])
    text = capsys.readouterr().out
    for needed in ("quic-pfec link tun --rate 50Mbps", "10.99.0.2", "root", "3 the run is void", "--left"):
        assert needed in text


@pytest.mark.parametrize(
    "values",
    [
        {"mtu": 1279},
        {"mtu": 1501},
        {"program": "rust"},
        {"rate_bps": 0},
        {"owd_s": -1},
        {"queue_bytes": 0},
        {"corrupt": 1.5},
        {"reorder": -0.1},
        {"clock": "sun"},
        {"slot_s": 0},
        {"loss": PRESETS["paper"], "trace": "x"},
    ],
)
def test_nonsense_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        TunOptions(**values)


@pytest.mark.parametrize("loss", [None, PRESETS["paper"]])
def test_json_round_trip(loss: GilbertElliott | None) -> None:
    values = json.loads(json.dumps(TunOptions(loss=loss, seed=3).to_json()))
    assert (values["queue_bytes"], values["slot_s"]) == (50_000, 1440 * 8 / 20e6)
    assert TunOptions.from_json(values).to_json() == values


def test_sizes_are_whole_packets_and_directions_have_their_own_losses(tmp_path: Path) -> None:
    forward, backward = TunOptions(loss=PRESETS["paper"], loss_both=True, rate_bps=8e6, owd_s=0.0).links()
    forward.epoch(0.0)
    backward.epoch(0.0)
    for link in (forward, backward):
        link.advance(1.0)
    assert forward.log().losses.tolist() != backward.log().losses.tolist()
    clean, _ = TunOptions(rate_bps=8e6, owd_s=0.0).links()
    delivery = clean.send(0.0, 1_000)
    assert getattr(delivery, "due_s", None) == pytest.approx(1e-3)  # no header is added
    path = tmp_path / "trace.txt"
    path.write_text("10")
    bits = TunOptions(trace=str(path)).trace_bits()
    assert bits is not None
    assert bits.tolist() == [True, False]


def test_c_arguments_lose_no_digit() -> None:
    options = TunOptions(rate_bps=3e6, loss=PRESETS["paper"], loss_both=True, seed=-1)
    values = dict(argument.split("=") for argument in c_arguments(options))
    assert float.fromhex(values["seconds_per_byte"]) == 8 / 3e6
    assert values["seeds"] == f"{2**64 - 2},{2**64 - 1}"
    assert [float.fromhex(number) for number in values["ge_both"].split(",")] == [0.001, 0.5, 0.02, 0.1]
    assert "trace" not in values
    assert "ge" in dict(argument.split("=") for argument in c_arguments(TunOptions(loss=PRESETS["paper"])))
