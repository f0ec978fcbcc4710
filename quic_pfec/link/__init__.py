"""The channels of `quic_pfec.sim`, applied to real packets.

- `relay`: a UDP relay in one thread, without any rights: rate, queue, delay and loss by slot. `python -m
  quic_pfec.link` runs it.
- `process`: the relay as a child process with typed commands, so that it shares no interpreter with what it measures.
- `options` and `report`: its settings, and what it says about a run and about itself.
- `tun`: a bottleneck between two network namespaces, for whole IP packets and so for kernel TCP (root). `emulator` runs
  the program in C behind it, `twin` is the same in Python; `namespaces`, `tun_options`, `tun_report` and `tun_command`
  are its two sides, its settings, its judgement of itself and its command line.
- `realtime`: what both ask of the kernel so that they wake up in time.
"""
