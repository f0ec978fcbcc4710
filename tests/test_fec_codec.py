"""What the project imports: native where it is built, the twin with one warning where it is not, never in silence."""

from __future__ import annotations

import os
import subprocess
import sys

from quic_pfec import _codec
from quic_pfec.fec import codec


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "QUIC_PFEC_ISA"} | environment
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)


def test_native_is_used() -> None:
    assert codec.Encoder is _codec.Encoder
    assert codec.Decoder is _codec.Decoder
    assert codec.isa() in codec.isa_levels()


def test_outcomes_equal_the_integers_of_the_codec() -> None:
    for source in codec.SourceOutcome:
        assert source == getattr(_codec, f"SOURCE_{source.name}")
    for repair in codec.RepairOutcome:
        assert repair == getattr(_codec, f"REPAIR_{repair.name}")


WITHOUT_NATIVE = """
import sys, warnings
sys.modules["quic_pfec._codec"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from quic_pfec.fec import codec
    from quic_pfec.fec.codec import Decoder
print(codec.isa(), Decoder.__module__, [w.category.__name__ for w in caught])
"""


def test_without_native_the_twin_and_one_warning() -> None:
    done = run(WITHOUT_NATIVE)
    assert done.stdout.strip() == "python quic_pfec.fec.reference ['RuntimeWarning']", done.stderr


def test_a_forced_level_never_falls_back() -> None:
    assert run(WITHOUT_NATIVE, QUIC_PFEC_ISA="scalar").returncode != 0
    done = run("import quic_pfec.fec.codec", QUIC_PFEC_ISA="mmx")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: QUIC_PFEC_ISA='mmx' is not a level")


WORKLOAD = """
import hashlib, random
from quic_pfec.fec import codec
rng = random.Random(5)
truth = [rng.randbytes(1372) for _ in range(60)]
encoder, decoder = codec.Encoder(1372, 60), codec.Decoder(1372, 60)
for symbol in truth:
    encoder.push(symbol)
digest = hashlib.sha256()
for sid in range(0, 60, 3):
    decoder.source(sid, truth[sid])
for number in range(50):
    repair = encoder.repair(0, number, 0, 48, 0, b"", 0, 60)
    digest.update(repair)
    decoder.repair(0, number, 0, 48, 0, b"", 0, 60, repair)
    decoder.poll(32)
assert [bytes(decoder.symbol(sid)) for sid in range(60)] == truth
print(codec.isa(), digest.hexdigest())
"""


def test_each_level_can_be_forced_and_gives_the_same_bytes() -> None:
    outputs = {}
    for level in _codec.isa_levels():
        done = run(WORKLOAD, QUIC_PFEC_ISA=level)
        assert done.returncode == 0, done.stderr
        name, outputs[level] = done.stdout.split()
        assert name == level
    assert len(set(outputs.values())) == 1
    assert run(WORKLOAD).stdout.split()[0] == _codec.isa_levels()[-1]
