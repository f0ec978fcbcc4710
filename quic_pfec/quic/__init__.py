"""The extension on top of aioquic: frames inside QUIC packets, the rate controller and the UDP endpoint.

`compat` is the one module that knows aioquic's private names; everything else here uses its typed surface. `rate` is
the provisioned congestion controller with its pacer, pure and driven by `now`. `endpoint` owns sockets and timers, and
nothing of the protocol.
"""

import logging

logging.getLogger("quic_pfec").addHandler(logging.NullHandler())  # the application decides what becomes of the log
