"""Channels: the generator's vectors, the exact statistics of Gilbert-Elliott loss, one sequence however it is drawn."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.sim.channel import (
    PRESETS,
    GilbertElliott,
    GilbertElliottChannel,
    NoLoss,
    SplitMix64,
    TraceChannel,
    TraceEnded,
    channel_factory,
    direction_seed,
    losses,
    parse,
)

PAPER = PRESETS["paper"]
probability = st.floats(0, 1)


def reference(params: GilbertElliott, seed: int, steps: int) -> list[bool]:
    """The process as its definition reads: stationary start; loss by the state; then the state moves."""
    random = SplitMix64(seed)
    bad = random.uniform() < params.p_good_bad / (params.p_good_bad + params.p_bad_good)
    bits = []
    for _ in range(steps):
        bits.append(random.uniform() < (params.loss_bad if bad else params.loss_good))
        if random.uniform() < (params.p_bad_good if bad else params.p_good_bad):
            bad = not bad
    return bits


def loss_runs(bits: np.ndarray) -> np.ndarray:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], bits.astype(np.int8), [0]])))
    return edges[1::2] - edges[::2]


class TestSplitMix64:
    def test_published_vectors(self) -> None:
        random = SplitMix64(1234567)
        assert [random.next() for _ in range(5)] == [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
            4593380528125082431,
            16408922859458223821,
        ]

    def test_zero_seed(self) -> None:
        assert SplitMix64(0).next() == 0xE220A8397B1DCDAF

    def test_uniform_takes_the_upper_53_bits(self) -> None:
        assert SplitMix64(0).uniform() == (0xE220A8397B1DCDAF >> 11) / 2**53

    @given(seed=st.integers(0, 2**64 - 1), counts=st.lists(st.integers(0, 50), max_size=5))
    @settings(deadline=None, max_examples=50)
    def test_blocks_equal_single_draws(self, seed: int, counts: list[int]) -> None:
        block, single = SplitMix64(seed), SplitMix64(seed)
        for count in counts:
            assert block.uniforms(count).tolist() == [single.uniform() for _ in range(count)]
        assert block.next() == single.next()


class TestGilbertElliott:
    def test_exact_statistics_of_the_papers_channel(self) -> None:
        assert PAPER.mean_loss == pytest.approx(0.08417, abs=5e-6)
        assert PAPER.mean_loss_run == pytest.approx(1.804, abs=5e-4)
        assert PAPER.loss_run_shares(5) == pytest.approx([0.558, 0.243, 0.110, 0.049, 0.022], abs=1e-3)

    def test_run_shares_agree_with_the_mean_run(self) -> None:
        shares = PAPER.loss_run_shares(400)
        assert sum(shares) == pytest.approx(1)
        assert sum(length * share for length, share in enumerate(shares, 1)) == pytest.approx(PAPER.mean_loss_run)

    def test_drawn_statistics_agree_with_the_exact_ones(self) -> None:
        bits = losses(GilbertElliottChannel(PAPER, 1), 2_000_000)
        runs = loss_runs(bits)
        assert bits.mean() == pytest.approx(PAPER.mean_loss, rel=0.01)
        assert runs.mean() == pytest.approx(PAPER.mean_loss_run, rel=0.01)
        shares = np.bincount(runs, minlength=6)[1:6] / len(runs)
        assert shares == pytest.approx(PAPER.loss_run_shares(5), abs=0.005)

    def test_starts_stationary(self) -> None:
        first = [GilbertElliottChannel(PAPER, seed).lost() for seed in range(20_000)]
        assert np.mean(first) == pytest.approx(PAPER.mean_loss, rel=0.08)

    def test_runs_at_the_extremes(self) -> None:
        assert PRESETS["none"].mean_loss_run == 0
        assert PRESETS["none"].loss_run_shares(2) == [0, 0]
        assert GilbertElliott(1, 1, 0.5, 0.5).mean_loss_run == float("inf")

    @pytest.mark.parametrize(
        ("name", "loss", "run"),
        [
            ("iid5", 0.05, 1 / 0.95),
            ("ge2", 0.0202, 1.557),
            ("long8", 0.0842, 1.942),
            ("starlink", 0.0195, 2.18),
            ("att", 0.0067, 5.08),
            ("verizon", 0.0021, 4.44),
        ],
    )
    def test_presets_are_what_their_sources_measured(self, name: str, loss: float, run: float) -> None:
        assert PRESETS[name].mean_loss == pytest.approx(loss, abs=2e-4)
        assert PRESETS[name].mean_loss_run == pytest.approx(run, abs=0.01)

    def test_parse(self) -> None:
        assert parse("paper") == PAPER == parse("0.001,0.5,0.02,0.1")

    @pytest.mark.parametrize(
        "text", ["", "papers", "1,2,3", "0.1,0.2,0.3,x", "0.1,0.2,0.3,1.5", "0.1,0.5,0,0", "nan,0,1,1"]
    )
    def test_parse_refuses(self, text: str) -> None:
        with pytest.raises(ValueError):
            parse(text)


class TestGilbertElliottChannel:
    def test_pinned_sequence(self) -> None:
        """What other implementations must reproduce: 100,000 steps of the paper's channel, seed 1."""
        bits = losses(GilbertElliottChannel(PAPER, 1), 100_000)
        assert (int(bits.sum()), len(loss_runs(bits))) == (8364, 4676)
        packed = np.packbits(bits, bitorder="little").tobytes()
        assert hashlib.sha256(packed).hexdigest()[:16] == "1de9d96883c46e82"

    @given(
        numbers=st.tuples(probability, probability, probability, probability).filter(lambda p: p[2] + p[3] > 0),
        seed=st.integers(0, 2**64 - 1),
    )
    @settings(deadline=None, max_examples=100)
    def test_equals_the_definition(self, numbers: tuple[float, float, float, float], seed: int) -> None:
        params = GilbertElliott(*numbers)
        assert losses(GilbertElliottChannel(params, seed), 300).tolist() == reference(params, seed, 300)

    def test_one_sequence_however_it_is_drawn(self) -> None:
        expected = reference(PAPER, 5, 5000)
        channel = GilbertElliottChannel(PAPER, 5)
        drawn = [channel.lost() for _ in range(10)]
        drawn += losses(channel, 3000).tolist()
        drawn += [channel.lost() for _ in range(1500)]
        drawn += losses(channel, 0).tolist()
        drawn += losses(channel, 490).tolist()
        assert drawn == expected


class TestTraceChannel:
    def test_wraps_from_its_start(self) -> None:
        channel = TraceChannel(b"\0\1\1\0\1", start=3)
        assert losses(channel, 7).tolist() == [False, True, False, True, True, False, True]
        assert channel.lost() is False

    def test_ends(self) -> None:
        channel = TraceChannel(np.array([True, False, True]), wraps=False)
        assert [channel.lost() for _ in range(3)] == [True, False, True]
        with pytest.raises(TraceEnded):
            channel.lost()
        with pytest.raises(TraceEnded):
            TraceChannel(b"\0\1", wraps=False).take(3)

    @pytest.mark.parametrize("bits", [b"", b"\0\2", [[0, 1]], [0.5]])
    def test_refuses(self, bits: object) -> None:
        with pytest.raises(ValueError):
            TraceChannel(bits)  # type: ignore[arg-type]

    def test_refuses_a_start_outside(self) -> None:
        with pytest.raises(ValueError):
            TraceChannel(b"\0\1", start=2)


def test_losses_of_any_channel() -> None:
    class EveryThird:
        step = 0

        def lost(self) -> bool:
            self.step += 1
            return self.step % 3 == 0

    assert losses(EveryThird(), 6).tolist() == [False, False, True, False, False, True]
    assert not losses(NoLoss(), 100).any()
    assert NoLoss().lost() is False


def test_factories_restart_the_sequence() -> None:
    for model in (PAPER, np.array([True, False, False]), None):
        factory = channel_factory(model, 7)
        assert losses(factory(), 500).tolist() == losses(factory(), 500).tolist()
    assert losses(channel_factory(PAPER, 7)(), 500).tolist() == reference(PAPER, 7, 500)
    assert losses(channel_factory(np.array([True, False]), 0, start=1)(), 2).tolist() == [False, True]
    with pytest.raises(ValueError):
        channel_factory(np.zeros(0, dtype=np.bool_), 0)


def test_directions_have_seeds_of_their_own() -> None:
    assert len({direction_seed(seed, direction) for seed in range(50) for direction in (0, 1)}) == 100
