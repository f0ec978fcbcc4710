"""What the receiver of a hand-off gets: the cache as it was at the freeze, and which parts of it are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quic_pfec.kv.assemble import AssembledKV
from quic_pfec.wire.manifest import Manifest


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedKV:
    """One hand-off at its freeze.

    manifest: what the sender declared. kv: raw arrays with zeros where nothing came, and which rows are valid.
    handle: names this cache in later requests of the peer. frozen_s, deadline_s: `time.monotonic()` of this machine.
    tokens: ids of the whole context, uint32 [first_token + tokens], where they came (missing="recompute").
    """

    manifest: Manifest
    kv: AssembledKV
    handle: int
    frozen_s: float
    deadline_s: float
    tokens: NDArray[np.uint32] | None = None

    @property
    def complete(self) -> NDArray[np.bool_]:
        """bool [units]: came whole, digest right."""
        return self.kv.complete

    @property
    def is_complete(self) -> bool:
        return bool(self.kv.complete.all())

    @property
    def nbytes(self) -> int:
        """Memory that the raw arrays hold, in bytes."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.kv.arrays.layers)

    def float32(self) -> tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]:
        """(keys, values) of each layer as float32 `[kv_heads, tokens, head_dim]`, zeros where nothing came.

        `kv.row_valid[layer]`, bool `[kv_heads, tokens]`, says which rows are whole.
        """
        layers = self.kv.arrays.convert("fp32").layers
        return tuple((keys.view(np.float32), values.view(np.float32)) for keys, values in layers)

    def to_cache(
        self,
        config: Any,
        *,
        dtype: Any = None,
        device: Any = "cpu",
        base: Any = None,
        room: Any = None,
        frame: Any = None,
        model: Any = None,
    ) -> Any:
        """A cache for a Hugging Face model of `config`, usable with `generate()`.

        dtype: torch dtype or name, default the sender's own; base: the cache that an increment continues; room, frame:
        see `kv.hf.make_room` and `make_frame`. Rows that did not come are masked or zero as the manifest's `missing`
        says; for masks, `kv.attention.attach(model)` once. With missing="recompute" and the model itself they are
        computed, holes of `base` included, however long it takes; without `model` they are masked.
        Raises ImportError naming the extra, ValueError if the pieces do not fit the model.
        """
        rebuilt = self.rebuild(config, dtype=dtype, device=device, base=base, room=room, frame=frame)
        if model is not None and self.manifest.missing == "recompute":
            from quic_pfec.kv.recompute import fill

            if self.tokens is None:
                raise ValueError("the rows that did not come cannot be computed: the token ids did not come either")
            rebuilt = fill(model, rebuilt, self.tokens)
        return rebuilt.to_cache()

    def rebuild(
        self,
        config: Any,
        *,
        dtype: Any = None,
        device: Any = "cpu",
        base: Any = None,
        room: Any = None,
        frame: Any = None,
    ) -> Any:
        """The `kv.hf.Rebuilt` of which `to_cache` makes its cache, holes not yet filled. Arguments and errors as there.

        It may share the memory of `kv.arrays`.
        """
        from quic_pfec.kv import hf

        whole = self.is_complete
        return hf.rebuild(
            self.kv.arrays,
            None if whole or self.manifest.missing == "zero" else self.kv.row_valid,
            config,
            missing="zero" if self.manifest.missing == "zero" else "mask",
            dtype=dtype or self.manifest.dtype,
            device=device,
            first_token=self.manifest.first_token,
            base=base,
            room=room,
            frame=frame,
        )
