"""Bytes on the wire and what they mean: pure functions between buffers and frozen dataclasses.

The package exists so that everything a peer sends meets a named limit in one place, before any allocation or loop, and
so that the format can be read (and tested) without a connection. It keeps no state between frames, except in
`messages.MessageReader`, and does no I/O. Checks that need a session's state, such as credit, belong to the transfer
layer. The format is written down in docs/wire.md.
"""
