"""The learner: the same seed, the same weights; cut and continued; and what its updates are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gymnasium")
torch = pytest.importorskip("torch")
from quic_pfec.schedule.network import forward, load_network, save_network  # noqa: E402
from quic_pfec.train.ddqn import Args, Learner, load_checkpoint, save_checkpoint, train  # noqa: E402
from quic_pfec.wire.errors import LocalError  # noqa: E402

TINY = Args(
    distribution="wide", transitions=1200, pretraining=700, returns=20, batch=32, sync=10, lanes=4, choose=1, seed=3
)


@pytest.fixture(autouse=True)
def few_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quic_pfec.train.ddqn.VALIDATION_WORLDS", 2)


def test_defaults_are_the_papers() -> None:
    args = Args()
    assert (args.transitions - args.pretraining) / args.every == 16_550
    assert (args.learning_rate, args.gamma, args.clip, args.sync, args.decay) == (1e-4, 1.0, 5.0, 500, 1.0)
    assert (args.epsilon, args.epsilon_share, args.window) == ((0.25, 0.05), 0.8, "full")


def test_a_seed_is_a_network(tmp_path: Path) -> None:
    first, again = train(Learner(TINY), name="tiny"), train(Learner(TINY), name="tiny")
    other = train(Learner(replace(TINY, seed=4)))
    assert first.curve == again.curve
    assert (first.network.w2 == again.network.w2).all()
    assert (first.network.w2 != other.network.w2).any()
    save_network(first.network, tmp_path / "tiny.npz")
    read = load_network(tmp_path / "tiny.npz")
    assert (read.name, read.kind, read.window, read.seed) == ("tiny", "q", "full", 3)
    assert read.settings["transitions"] == 1200
    assert read.versions["torch"] == torch.__version__
    x = first.network.low[None]
    assert np.allclose(forward(read, x), forward(first.network, x))


def test_updates_and_transitions_are_counted() -> None:
    learner = Learner(TINY)
    result = train(learner)
    assert learner.transitions == 1200
    assert learner.updates == (1200 - 700) // 16
    assert learner.replay.size == 1200
    assert result.curve[-1]["updates"] == learner.updates
    assert (learner.low <= learner.high).all()


def test_the_target_follows_at_the_sync_alone() -> None:
    learner = Learner(replace(TINY, sync=20))
    learner.warm_up()
    before = [value.clone() for value in learner.target.parameters()]
    while learner.updates < 19:
        learner.learn()
    assert all(torch.equal(a, b) for a, b in zip(before, learner.target.parameters(), strict=True))
    while learner.updates < 20:
        learner.learn()
    assert not all(torch.equal(a, b) for a, b in zip(before, learner.target.parameters(), strict=True))


def test_standardising_is_taken_up_by_the_first_layer() -> None:
    learner = Learner(TINY)
    learner.warm_up()
    x = learner.replay.arrays["features"][:50]
    with torch.no_grad():
        wanted = learner.online(torch.from_numpy(learner._inputs(x))).numpy()
    assert np.allclose(forward(learner.network(learner.folded()), x), wanted, atol=1e-3)


def test_a_fifth_choice() -> None:
    result = train(Learner(replace(TINY, resend=True, heuristic="arq", window="sack")))
    assert (result.network.resend, result.network.choices) == (True, 5)
    assert result.curve[-1]["j_block"] > 0


def test_episodes_end_a_run() -> None:
    learner = Learner(replace(TINY, transitions=100_000, episodes=2))
    train(learner)
    assert 2 <= learner.episodes < 10
    assert learner.transitions < 20_000


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    learner = Learner(TINY)
    learner.warm_up()
    for _ in range(50):
        learner.learn()
    learner.measure()
    save_checkpoint(learner, tmp_path / "run.npz")
    again = load_checkpoint(tmp_path / "run.npz")
    assert again.args == TINY
    assert (again.transitions, again.updates) == (learner.transitions, learner.updates)
    assert again.curve == learner.curve
    assert all(torch.equal(a, b) for a, b in zip(learner.online.parameters(), again.online.parameters(), strict=True))
    assert (again.replay.saved()["features"] == learner.replay.saved()["features"]).all()
    moments = [state["exp_avg"] for state in learner.adam.state.values()]
    assert all(torch.equal(a, state["exp_avg"]) for a, state in zip(moments, again.adam.state.values(), strict=True))
    result = train(again)
    assert again.transitions == 1200
    assert again.updates == (1200 - 700) // 16
    assert len(result.curve) >= 2


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for content in (b"", b"PK\x03\x04", b"\x80\x04\x95"):
        (tmp_path / "run.npz").write_bytes(content)
        with pytest.raises(LocalError, match="no checkpoint"):
            load_checkpoint(tmp_path / "run.npz")
    np.savez(tmp_path / "other.npz", meta=np.frombuffer(b"{}", dtype=np.uint8))
    with pytest.raises(LocalError, match="no checkpoint"):
        load_checkpoint(tmp_path / "other.npz")
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "absent.npz")
