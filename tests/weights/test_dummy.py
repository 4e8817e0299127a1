"""Models that exist only as a name: the same weights every time, in every encoding, and a tokenizer of bytes."""

from pathlib import Path

import numpy as np
import pytest

from minserve.backend.base import CheckpointError, StepLimits
from minserve.backend.numpy_backend import NumpyBackend
from minserve.backend.tensor import Encoding
from minserve.models import load
from minserve.text.tokenizer import Tokenizer
from minserve.weights.checkpoint import load_checkpoint
from minserve.weights.dummy import PRESETS, SPECIALS, DummyCheckpoint, byte_tokenizer, is_dummy, load_dummy
from tests.helpers import Part, make_batch

CONFIG = PRESETS["llama-tiny"] | {"hidden_size": 256}
NAME = "model.layers.0.mlp.gate_proj.weight"


def test_weights_depend_on_seed_and_name_and_nothing_else() -> None:
    one, two = DummyCheckpoint(CONFIG), DummyCheckpoint(CONFIG)
    two.tensor("lm_head.weight")
    np.testing.assert_array_equal(one.tensor(NAME).data, two.tensor(NAME).data)
    assert not np.array_equal(one.tensor(NAME).data, DummyCheckpoint(CONFIG, seed=1).tensor(NAME).data)
    assert not np.array_equal(one.tensor(NAME).data, one.tensor(NAME.replace("gate", "up")).data)


@pytest.mark.parametrize("encoding", list(Encoding))
def test_every_encoding_has_about_the_same_spread(encoding: Encoding) -> None:
    checkpoint = DummyCheckpoint(CONFIG, encoding=encoding)
    tensor = checkpoint.tensor(NAME)
    assert tensor.encoding is encoding
    values = tensor.float32()
    assert values.std() == pytest.approx(256**-0.5, rel=0.2)
    assert abs(values.mean()) < 0.2 * values.std()
    assert checkpoint.tensor("model.norm.weight").encoding is Encoding.F32
    assert checkpoint.tensor("model.norm.weight").float32().mean() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("preset", [p for p in PRESETS if p.endswith("tiny")])
def test_every_name_gives_a_tensor(preset: str) -> None:
    checkpoint = load_dummy(f"dummy:{preset}").checkpoint
    for name in checkpoint.names():
        assert np.isfinite(checkpoint.tensor(name).float32()).all()
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        checkpoint.tensor("x")


@pytest.mark.parametrize("preset", [p for p in PRESETS if p.endswith("tiny")])
def test_a_family_can_be_run_on_dummy_weights(preset: str) -> None:
    backend = NumpyBackend(block_size=16)
    model = load(load_dummy(f"dummy:{preset}").checkpoint, backend, 64)
    program = backend.build(model.forward, model.spec, StepLimits(16, 1, 16, 64, 4))
    logits = program.logits(make_batch([Part(0, list(b"Hello"), [2], rows=range(5))]))
    assert logits.shape == (5, 256 + len(SPECIALS))
    assert np.isfinite(logits).all()
    assert len(set(logits.argmax(axis=1))) > 1


def test_names_choose_preset_and_encoding() -> None:
    model = load_checkpoint(Path("dummy:smollm2-135m:q8_0"))
    assert model.file_format == "dummy"
    assert model.checkpoint.tensor(NAME).encoding is Encoding.Q8_0
    assert load_checkpoint(Path("dummy")).checkpoint.config is PRESETS["llama-tiny"]
    assert is_dummy("dummy")
    assert not is_dummy("dummy-model")
    for name, message in (
        ("dummy:x", "no dummy model 'x'; there are llama-tiny"),
        ("dummy:llama-tiny:q3", "no encoding 'q3'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_dummy(name)


def test_a_byte_is_its_own_token() -> None:
    tokenizer = Tokenizer.from_source(byte_tokenizer())
    text = "".join(map(chr, range(0x250))) + "čau 🙂"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.token_id(special) for special in SPECIALS] == [256, 257, 258, 259, 260]
    assert tokenizer.vocab_size == 261


def test_the_rest_of_a_large_vocabulary_is_words() -> None:
    tokenizer = Tokenizer.from_source(byte_tokenizer(2000))
    assert tokenizer.vocab_size == 2000
    words = [tokenizer.token_bytes(i) for i in range(261, 2000)]
    assert all(word.startswith(b" ") and word[1:].isalpha() for word in words)
    assert len(set(words)) == len(words)
    assert tokenizer.encode(tokenizer.decode([300])) == list(tokenizer.token_bytes(300))
