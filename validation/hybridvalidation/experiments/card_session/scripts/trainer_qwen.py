"""Fine-tune a Qwen2 of 0.5B with transformers' Trainer: bf16, accumulation, checkpointing, evaluation at the end."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments


class Tokens(Dataset):
    """Random sequences of 1,024 tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 151_936, (1024,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


config = Qwen2Config(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4, per_device_eval_batch_size=4, gradient_accumulation_steps=2,
        gradient_checkpointing=True, bf16=True, max_steps=5, logging_steps=1, eval_strategy="steps", eval_steps=5,
        save_strategy="no", report_to=[], prediction_loss_only=True,
    )  # fmt: skip
    trainer = Trainer(
        model=Qwen2ForCausalLM(config), args=arguments, train_dataset=Tokens(),
        eval_dataset=torch.utils.data.Subset(Tokens(), range(8)),
    )  # fmt: skip
    trainer.train()
