"""The codec the rest of the project imports: native where it was built, the plain-Python twin elsewhere.

The twin does the same thing some hundred times slower, so its use is announced by one RuntimeWarning. A level forced
through QUIC_PFEC_ISA that cannot be had is an error, never a reason to fall back.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from quic_pfec.fec.outcome import RepairOutcome, SourceOutcome

if TYPE_CHECKING:
    from quic_pfec._codec import (
        INTAKE_CONTRADICTS,
        INTAKE_END,
        INTAKE_ODD,
        Decoder,
        Encoder,
        Intake,
        expand,
        isa,
        isa_levels,
        scatter_unit,
    )
else:
    try:
        from quic_pfec._codec import (
            INTAKE_CONTRADICTS,
            INTAKE_END,
            INTAKE_ODD,
            Decoder,
            Encoder,
            Intake,
            expand,
            isa,
            isa_levels,
            scatter_unit,
        )
    except ImportError as error:
        if os.environ.get("QUIC_PFEC_ISA"):
            raise
        from quic_pfec.fec.coefficients import expand
        from quic_pfec.fec.reference import (
            INTAKE_CONTRADICTS,
            INTAKE_END,
            INTAKE_ODD,
            Decoder,
            Encoder,
            Intake,
            isa,
            isa_levels,
            scatter_unit,
        )

        warnings.warn(
            f"quic_pfec._codec cannot be imported ({error}); the pure-Python codec is used, which is far too slow for "
            "a fast link",
            RuntimeWarning,
            stacklevel=2,
        )

__all__ = [
    "INTAKE_CONTRADICTS",
    "INTAKE_END",
    "INTAKE_ODD",
    "Decoder",
    "Encoder",
    "Intake",
    "RepairOutcome",
    "SourceOutcome",
    "expand",
    "isa",
    "isa_levels",
    "scatter_unit",
]
