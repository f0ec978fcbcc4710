"""KV caches <-> blocks: geometry, wire dtypes, order of sending, and the rebuild from whatever arrived.

A *unit* is what is sent, protected and scored as one thing: one layer x up to `block_tokens` consecutive tokens, all KV
heads, keys and values, with a digest at its end. The sender's half is `layout` -> `profile` -> `order` -> `units` ->
`prepared`; the receiver's half is `layout` -> `assemble`. These modules know numpy alone and hold values as raw bit
patterns, so that bfloat16 needs no framework; tensors meet them in the modules whose first line says torch.
"""
