"""The streaming code: a sliding random-linear code over GF(2^8), sans-IO.

`codec` holds what the rest of the project uses; `coefficients` and `reference` are the specification in plain Python
that the native code is tested against, and what runs where it could not be built; `rfc8681` serves cross-checks only.
"""

__all__ = ["codec", "coefficients", "outcome", "reference", "rfc8681"]
