"""One hand-off, sans-IO: a sender that plans frames and a receiver that turns frames into units. `now` is passed in."""
