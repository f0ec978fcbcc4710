"""The extension on top of aioquic: frames inside QUIC packets, congestion controllers and the UDP endpoint.

`compat` is the one module that knows aioquic's private names; everything else here uses its typed surface. `rate` and
`bbr` are congestion controllers with their pacer, pure and driven by `now`. `endpoint` owns sockets and timers, and
nothing of the protocol.
"""

import logging

logging.getLogger("quic_pfec").addHandler(logging.NullHandler())  # the application decides what becomes of the log
