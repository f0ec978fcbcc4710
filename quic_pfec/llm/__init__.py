"""The LLM endpoint's model side: loading, prefill, continuation from a cache with holes, and profiles of what matters.

Imports torch and transformers; nothing outside this room and the torch modules of `kv` does.
"""
