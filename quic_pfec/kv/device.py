"""A cache on another device than the network's memory: it follows the assembly while units are still in flight.

At the freeze there is no time to move a whole cache to a GPU and to convert it there. So each unit goes as soon as it
is complete: through pinned memory, by copies that nobody waits for, in the wire's dtype; the device makes the model's
dtype of it. What is left for the freeze are the units of which a part came. The tensors are zero until then: memory of
another request never shows through a hole.
"""

from __future__ import annotations

from typing import Any, Final

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise ImportError('quic_pfec.kv.device needs torch: pip install "quic-pfec[hf]"') from error

import numpy as np
from numpy.typing import NDArray

from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.hf import DTYPES, Frame, rebuildable

STAGING_BYTES: Final = 4 << 20
"""Pinned memory of one mirror, in two halves: one is filled while the other is copied."""


class DeviceMirror:
    """The rows of an `Assembler` on `device`, in `dtype`. For one thread, which may be another than the assembler's.

    Works on any device; pinned memory and a stream of its own are used on CUDA. Raises ValueError for a model whose
    layers cannot be rebuilt or do not match.
    """

    def __init__(self, assembler: Assembler, config: Any, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._assembler = assembler
        self._layout = layout = assembler.layout
        self._arrays = assembler.arrays
        self._done: NDArray[np.bool_] = np.zeros(layout.unit_count, dtype=np.bool_)
        self.copied = 0
        """Units copied while others were in flight."""
        cache = rebuildable(config)
        if len(cache.layers) != len(layout.layers):
            raise ValueError(f"the model has {len(cache.layers)} layers, the received cache {len(layout.layers)}")
        rows: list[tuple[Tensor, Tensor]] = []
        for shape in layout.layers:
            size = (1, shape.kv_heads, layout.tokens, shape.head_dim)
            rows.append((torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device)))
        self._frame = Frame(cache, tuple(cache.layers), tuple(rows))
        cuda = self.device.type == "cuda"
        self._source = DTYPES[assembler.dtype]
        half = STAGING_BYTES // 2 // self._source.itemsize
        self._staging = tuple(torch.zeros(half, dtype=self._source, pin_memory=cuda) for _ in range(2))
        self._side: Any = None
        self._copied: list[Any] = [None, None]  # events: this half of the staging has been read
        self._half = 0
        self._filled = 0
        if cuda:
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._side.wait_stream(torch.cuda.current_stream(self.device))  # the zeros come first
            for pair in rows:  # given up in mid-transfer, their memory is nobody else's before the last copy is done
                for tensor in pair:
                    tensor.record_stream(self._side)

    def catch_up(self, limit: int | None = None) -> int:
        """Starts copies of the units that completed since; at most `limit`. Returns how many."""
        fresh = np.flatnonzero(self._assembler.complete & ~self._done)[:limit]
        for unit in fresh.tolist():
            self._copy(unit)
        self._done[fresh] = True
        self.copied += len(fresh)
        return len(fresh)

    def finish(self) -> Frame:
        """What is left, after the assembler has finished; waits until it is there. Call it once."""
        layout = self._layout
        left = ~self._done
        left[layout.block_count :] &= self._assembler.complete[layout.block_count :]  # others changed nothing
        for unit in np.flatnonzero(left).tolist():
            start, stop = layout.row_range(unit)
            keys, values = self._arrays.layers[layout.layer_of(unit)]
            if bool(keys[:, start:stop].any()) or bool(values[:, start:stop].any()):
                self._copy(unit)
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
            self._side.synchronize()
        return self._frame

    def _copy(self, unit: int) -> None:
        layer = self._layout.layer_of(unit)
        start, stop = self._layout.row_range(unit)
        for host, target in zip(self._arrays.layers[layer], self._frame.rows[layer], strict=True):
            self._copy_rows(host[:, start:stop], target[0, :, start:stop])

    def _copy_rows(self, host: NDArray[Any], target: Tensor) -> None:
        """`host` is raw bits, `target` the same rows on the device, `[kv_heads, rows, head_dim]`."""
        bits = torch.from_numpy(np.ascontiguousarray(host).view(f"i{host.itemsize}")).view(self._source)
        if self._side is None:
            target.copy_(bits)
            return
        count = bits.numel()
        if count > self._staging[0].numel():  # a unit larger than the staging goes unpinned
            with torch.cuda.stream(self._side):
                target.copy_(bits.to(self.device))
            return
        if self._filled + count > self._staging[0].numel():
            self._turn()
        staged = self._staging[self._half][self._filled : self._filled + count].view(bits.shape)
        staged.copy_(bits)
        self._filled += count
        with torch.cuda.stream(self._side):
            target.copy_(staged.to(self.device, non_blocking=True))

    def _turn(self) -> None:
        """To the other half of the staging, once the device has read it."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._side)
        self._copied[self._half] = event
        self._half = 1 - self._half
        self._filled = 0
        if self._copied[self._half] is not None:
            self._copied[self._half].synchronize()
