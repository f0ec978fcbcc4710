"""The channels of `quic_pfec.sim`, applied to real datagrams.

- `relay`: a UDP relay in one thread, without any rights: rate, queue, delay and loss by slot. `python -m
  quic_pfec.link` runs it.
- `process`: the relay as a child process with typed commands, so that it shares no interpreter with what it measures.
- `options` and `report`: its settings, and what it says about a run and about itself.
"""
