"""TRL's SFTTrainer; settings are ``SFTConfig``, and ``adapter``: arguments of PEFT's ``LoraConfig`` (none: full)."""

import tempfile
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hybridvalidation.engines.hf_model import build_model
from hybridvalidation.engines.task import Task
from hybridvalidation.engines.transformers import common_arguments, losses_of


def train(task: Task) -> list[float]:
    """Run the steps; return the loss of each."""
    settings = task.settings
    adapter = settings.pop("adapter", None)
    samples = Dataset.from_dict({"input_ids": [task.sample] * (task.workload.batch_size * task.num_steps)})
    with tempfile.TemporaryDirectory() as folder:
        given = common_arguments(task, folder) | {"max_length": task.workload.seq_len} | settings
        trainer = SFTTrainer(
            model=build_model(task), args=SFTConfig(**given), train_dataset=samples, processing_class=_tokenizer(),
            peft_config=None if adapter is None else _lora(adapter),
        )  # fmt: skip
        trainer.train()
        return losses_of(trainer)


def _lora(adapter: dict[str, Any]) -> Any:
    from peft import LoraConfig  # noqa: PLC0415  only what has an adapter needs it

    return LoraConfig(**adapter, task_type="CAUSAL_LM")


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that pads and ends; the samples are tokens already."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1, "<unknown>": 2}, unk_token="<unknown>"))  # noqa: S106  a word
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")  # noqa: S106  words
