"""Generation by transformers is planned by its length: what it needs is what the loop of all tokens needs."""

from typing import Any
from unittest import mock

import pytest
import torch

from hybridtrain.virtual_gpu import VirtualGpu
from hybridtrain.virtual_gpu.facade import generation

transformers = pytest.importorskip("transformers")

_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64
}  # fmt: skip
_NEW = 24


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES))


def _sliding() -> Any:
    shape = _SIZES | {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 16}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**shape))


def _encoder_decoder() -> Any:
    shape = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "d_kv": 8, "vocab_size": 64}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, decoder_start_token_id=0))


def _plan(make: Any, options: dict[str, Any], *, runs_all: bool) -> tuple[list[int], list[float], int]:
    """Return peaks and end of allocated bytes, time, and how often the model ran."""
    calls: list[int] = []
    skips = (lambda _calls, _number: False) if runs_all else generation._Calls._skips
    with VirtualGpu("rtx-4090") as gpu, mock.patch.object(generation._Calls, "_skips", skips):
        model = make().cuda().eval()
        model.lm_head.register_forward_hook(lambda *_: calls.append(1))
        ids = torch.randint(5, 60, (2, 9), device="cuda")
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=_NEW, pad_token_id=0, **options)
        del out
        left = torch.cuda.memory_allocated()
    run = gpu.report()
    return [run.peak.allocated_bytes, run.peak.requested_bytes, left], [run.time.seconds], len(calls)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(_llama, {}, id="greedy"),
        pytest.param(
            _llama, {"do_sample": True, "return_dict_in_generate": True, "output_scores": True}, id="keeps scores"
        ),
        pytest.param(_llama, {"num_beams": 2}, id="beams"),
        pytest.param(_sliding, {}, id="sliding window"),
        pytest.param(_encoder_decoder, {}, id="encoder and decoder"),
    ],
)
def test_peak_is_that_of_the_loop_of_all_tokens(make: Any, options: dict[str, Any]) -> None:
    peaks, seconds, calls = _plan(make, options, runs_all=False)
    true_peaks, true_seconds, true_calls = _plan(make, options, runs_all=True)
    assert peaks == true_peaks
    assert seconds == pytest.approx(true_seconds, rel=0.02)  # skipped tokens take the time of shorter ones
    assert calls < true_calls == _NEW


def test_generation_ends_at_its_longest_where_ends_of_rows_are_unknown() -> None:
    with VirtualGpu("rtx-4090"):
        model = _llama().cuda().eval()
        model.generation_config.eos_token_id = 2
        ids = torch.randint(5, 60, (2, 9), device="cuda")
        assert model.generate(ids, max_new_tokens=20, do_sample=True).shape == (2, 29)


def test_the_library_is_as_before_afterwards() -> None:
    mixin = transformers.GenerationMixin
    before = mixin._sample
    with VirtualGpu("rtx-4090"):
        assert mixin._sample is not before
    assert mixin._sample is before
