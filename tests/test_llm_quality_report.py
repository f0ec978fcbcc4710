"""quic_pfec.llm.quality_report: records into cells, clustered by example."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from quic_pfec.llm.quality import Record
from quic_pfec.llm.quality_report import cells

pytestmark = pytest.mark.model


def test_groups_and_clusters() -> None:
    records = [
        Record(
            example=name, arm="handoff", name="hybrid", receiver="mask", share=0.8, loss=loss, agreement=agreement,
            kl=0.1, f1=0.5, blocks=0.7,
        )
        for name, agreement in (("a", 0.9), ("b", 0.5))
        for loss in (0, 1)
    ]  # fmt: skip
    records.append(Record(example="a", arm="retention", name="fifo", receiver="zero", share=0.4, agreement=0.3, kl=2.0))
    handoff, kept = cells(records)
    assert handoff.agreement.mean == pytest.approx(0.7)
    assert (handoff.agreement.low, handoff.agreement.high) == pytest.approx((0.5, 0.9))
    assert handoff.agreement.clusters == 2
    assert handoff.f1 is not None
    assert kept.f1 is None
    assert handoff.as_dict()["blocks"]["mean"] == pytest.approx(0.7)
    assert "f1" not in kept.as_dict()
