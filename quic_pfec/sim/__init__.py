"""Channels, links and endpoints in virtual time, and the bound no sender can beat on them.

Every claim about goodput, ordering or deadlines is checked here, where a run is a pure function of its seeds: a
loaded machine changes how long a run takes, never what it shows. The same channels and the same link drive real
datagrams in `quic_pfec.link`.

- `channel`: loss processes (Gilbert-Elliott, traces), one bit a step, repeatable from a seed; `trace` reads the files.
- `link`: one direction of a bottleneck: rate, queue, loss by slot, delay. No clock of its own.
- `virtual`: two sans-IO endpoints joined by two links, driven by an event heap.
- `oracle`: what a genie that knows every loss beforehand would have delivered.
"""
