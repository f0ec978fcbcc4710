"""Drive one target with atheris: `python -m tests.fuzz.run session [libFuzzer options] [corpus folders]`.

Needs the `fuzz` extra. The Python of this project is instrumented; the C code is watched by the sanitisers in
`make fuzz`, which runs the tests, corpus included, in a build of its own.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["quic_pfec.fec", "tests.fuzz.targets"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
