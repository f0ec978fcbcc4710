"""The compiled scheduler where it was built, and one warning where it was not.

Without it the Python twins decide and plan, to the same effect but some tens of times slower.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quic_pfec.schedule import _policy as native

    AVAILABLE: bool
else:
    try:
        from quic_pfec.schedule import _policy as native

        AVAILABLE = True
    except ImportError as error:
        native = None
        AVAILABLE = False
        warnings.warn(
            f"quic_pfec.schedule._policy cannot be imported ({error}); the pure-Python scheduler is used, which is far "
            "too slow for a fast link",
            RuntimeWarning,
            stacklevel=2,
        )

__all__ = ["AVAILABLE", "native"]
