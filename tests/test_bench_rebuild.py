"""The rebuild benchmark: its own checks hold, and its percentiles are nearest ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench import rebuild  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)


def test_device_and_cpu_agree_and_no_canary_shows() -> None:
    assert rebuild.check(2, 96, "cpu", torch.float32, 1) == {"canary": "zero", "rows_equal": True, "logits_apart": 0.0}


def test_a_canary_that_shows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = rebuild.DeviceMirror.finish

    def dirty(self: rebuild.DeviceMirror) -> object:
        frame = finish(self)
        for keys, _ in frame.rows:
            keys[keys == 0] = rebuild.CANARY
        return frame

    monkeypatch.setattr(rebuild.DeviceMirror, "finish", dirty)
    with pytest.raises(AssertionError, match="shows where nothing came"):
        rebuild.check(2, 96, "cpu", torch.float32, 1)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.99, 4.0), (0.0, 1.0), (1.0, 4.0)])
def test_percentiles(share: float, expected: float) -> None:
    assert rebuild.percentile([4.0, 1.0, 3.0, 2.0], share) == expected
