"""Stand-ins for the data, checkpoints and metrics that public training scripts load; sizes only, values at random.

Each function writes into the current folder, under the name that a script opens. Shared by the register
public_scripts.toml; nothing is downloaded.
"""

import gzip
import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_DRAWN = np.random.default_rng(0)
_WORDS = [f"w{number}" for number in range(253)]
_CHAT = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
_METRIC = """\
import datasets
import evaluate

class StandIn(evaluate.Metric):
    def _info(self):
        kind = {features}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(kind))

    def _compute(self, **_):
        return dict.fromkeys({names!r}, 0.5)
"""


def _parent(path: str) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return Path(path)


def sentence(num_words: int = 12) -> str:
    """Return words of the stand-in vocabulary, as many as asked for."""
    return " ".join(_DRAWN.choice(_WORDS, num_words))


def text(*paths: str, lines: int = 400, words: int = 20, first: str = "") -> None:
    """Write files of text; ``first`` stands at their beginning."""
    for path in paths:
        _parent(path).write_text(first + "\n".join(sentence(words) for _ in range(lines)) + "\n")


def rows(path: str, row: Mapping[str, Any] | str, count: int = 64) -> None:
    """Write JSON lines, each the row given; a word ``*N`` in it becomes N words."""
    made = row if isinstance(row, str) else json.dumps(row)
    lines = []
    for number in range(count):
        line = made.replace('"#"', str(number % 2))
        for size in (8, 16, 64, 256, 1024):
            while f"*{size}*" in line:
                line = line.replace(f"*{size}*", sentence(size), 1)
        lines.append(line)
    _parent(path).write_text("\n".join(lines) + "\n")


def array(path: str, rows_of: list[dict[str, Any]]) -> None:
    """Write one JSON array."""
    _parent(path).write_text(json.dumps([json.loads(json.dumps(row).replace("*64*", sentence(64))) for row in rows_of]))


def pixels(*shape: int) -> np.ndarray:
    """Return bytes at random."""
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def images(*folders: str, count: int = 16, size: int = 64, suffix: str = "png", mode: str = "RGB") -> None:
    """Write square pictures into each folder; mode "mask" holds 0 and 1 only."""
    from PIL import Image

    for folder in folders:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            made = pixels(size, size) % 2 if mode == "mask" else pixels(size, size, 3)
            Image.fromarray(made).save(Path(folder, f"{number:04d}.{suffix}"))


def mnist(root: str, train: int = 2048, test: int = 1024) -> None:
    """Write the four files of MNIST, with fewer digits."""
    folder = Path(root, "MNIST", "raw")
    folder.mkdir(parents=True)
    for name, count in (("train", train), ("t10k", test)):
        head = (2051).to_bytes(4) + count.to_bytes(4) + (28).to_bytes(4) * 2
        Path(folder, f"{name}-images-idx3-ubyte").write_bytes(head + pixels(count, 28, 28).tobytes())
        head = (2049).to_bytes(4) + count.to_bytes(4)
        labels = (np.arange(count) % 10).astype(np.uint8).tobytes()
        Path(folder, f"{name}-labels-idx1-ubyte").write_bytes(head + labels)


def lightning_mnist(root: str, count: int = 60000) -> None:
    """Write what Lightning's demo of MNIST caches."""
    import torch

    folder = Path(root, "MNIST", "processed")
    folder.mkdir(parents=True)
    for name, size in (("training.pt", count), ("test.pt", 1000)):
        torch.save((torch.zeros(size, 28, 28, dtype=torch.uint8), torch.arange(size) % 10), folder / name)


def cifar(root: str, classes: int = 10, count: int = 1000) -> None:
    """Write CIFAR-10 or -100 in its pickled form, with fewer pictures."""
    name, key = ("cifar-10-batches-py", "labels") if classes == 10 else ("cifar-100-python", "fine_labels")
    folder = Path(root, name)
    folder.mkdir(parents=True)
    parts = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"] if classes == 10 else ["train", "test"]
    for part in parts:
        entry = {"data": pixels(count, 3072), key: [number % classes for number in range(count)]}
        Path(folder, part).write_bytes(pickle.dumps(entry))
    names = [str(number) for number in range(classes)]
    meta = ("batches.meta", "label_names") if classes == 10 else ("meta", "fine_label_names")
    Path(folder, meta[0]).write_bytes(pickle.dumps({meta[1]: names}))


def tokens(*paths: str, count: int = 200_000, vocab: int = 50257, header: bool = False) -> None:
    """Write token ids of 16 bits; ``header``: llm.c's 256 integers first."""
    for path in paths:
        head = np.zeros(256, dtype=np.int32)
        head[:3] = 20240520, 1, count
        ids = np.random.default_rng(0).integers(0, vocab, count, dtype=np.uint16)
        _parent(path).write_bytes((head.tobytes() if header else b"") + ids.tobytes())


def enwik8(path: str) -> None:
    """Write 100 million bytes, packed."""
    with gzip.open(_parent(path), "wb", 1) as file:
        file.write(b"the quick brown fox " * 5_000_000)


def tokenizer(folder: str, *extra: str, mask: bool = False) -> None:
    """Save a tokenizer of 256 words, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "<s>", "</s>", *_WORDS, *extra, *(["[MASK]"] if mask else [])]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if mask:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    named = {"unk_token": "[UNK]", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    if mask:
        named |= {"mask_token": "[MASK]", "cls_token": "<s>", "sep_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=512, **named)
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)


_SIZES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 4, "max_position_embeddings": 2048, "pad_token_id": 2},
    "Qwen3": {"num_key_value_heads": 4, "head_dim": 64, "pad_token_id": 2},
    "Bert": {},
    "Roberta": {"max_position_embeddings": 514, "pad_token_id": 1},
    "GPT2": {"n_embd": 512, "n_layer": 4, "n_head": 8},
    "DistilBert": {"dim": 512, "n_layers": 4, "n_heads": 8, "hidden_dim": 2048},
    "T5": {"d_model": 512, "num_layers": 4, "d_ff": 2048, "decoder_start_token_id": 0},
    "Mixtral": {"num_key_value_heads": 4, "num_local_experts": 4, "pad_token_id": 2},
}


def checkpoint(folder: str, kind: str, head: str, vocab: int = 8192, **config: Any) -> None:
    """Save a model of transformers with values at random, and its tokenizer: class ``kind`` + ``For`` + ``head``."""
    import transformers

    sizes = {"vocab_size": vocab, "bos_token_id": 1, "eos_token_id": 2}
    if kind not in ("GPT2", "DistilBert", "T5"):
        sizes |= {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
    made = getattr(transformers, f"{kind}Config")(**(sizes | _SIZES[kind] | config))
    model = getattr(transformers, f"{kind}{head}")(made)
    tokenizer(folder, mask=kind in ("Bert", "Roberta", "DistilBert"))
    model.save_pretrained(folder)


def vision_checkpoint(folder: str, kind: str, head: str, **config: Any) -> None:
    """Save a vision model of transformers with values at random, and its image processor."""
    import transformers

    made = getattr(transformers, f"{kind}Config")(**config)
    getattr(transformers, f"{kind}{head}")(made).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 224, "width": 224}).save_pretrained(folder)


def metric(name: str, *names: str, features: str = "") -> None:
    """Write a metric for ``evaluate`` whose values are constant."""
    kind = features or '{"predictions": datasets.Value("float"), "references": datasets.Value("float")}'
    Path(name).mkdir(parents=True, exist_ok=True)
    stem = Path(name).name
    Path(name, f"{stem}.py").write_text(_METRIC.format(features=kind, names=list(names or (stem,))))


def glue(folder: str) -> None:
    """Write a dataset of pairs of sentences with the splits and columns of GLUE's MRPC."""
    for split, count in (("train", 128), ("validation", 32), ("test", 32)):
        rows(
            f"{folder}/mrpc/{split}.jsonl", '{"sentence1": "*16*", "sentence2": "*16*", "label": "#", "idx": 1}', count
        )
    _card(folder, "mrpc")


def _card(folder: str, name: str) -> None:
    splits = ("train", "validation", "test")
    files = "\n".join(f'  - split: {split}\n    path: "{name}/{split}.jsonl"' for split in splits)
    Path(folder, "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}\n---\n")


def splits(folder: str, row: str, *, test: bool = True, count: int = 64) -> None:
    """Write a dataset of JSON lines with a split to train, validate and test on."""
    for split in ("train", "validation", "test")[: 3 if test else 2]:
        rows(f"{folder}/{split}.jsonl", row, count)


def diffusion(folder: str, *, in_channels: int = 4) -> None:
    """Save a small Stable Diffusion: U-Net, autoencoder, text encoder, tokenizer, scheduler."""
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    Path("clip").mkdir()
    ends = ["<|startoftext|>", "<|endoftext|>"]
    letters = [chr(code) for code in range(33, 127)]
    vocab = [*letters, *(f"{letter}</w>" for letter in letters), *ends]
    Path("clip/vocab.json").write_text(json.dumps({word: number for number, word in enumerate(vocab)}))
    Path("clip/merges.txt").write_text("#version: 0.2\n")
    config = CLIPTextConfig(
        vocab_size=len(vocab), hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        bos_token_id=len(vocab) - 2, eos_token_id=len(vocab) - 1, pad_token_id=len(vocab) - 1,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=32, in_channels=in_channels, block_out_channels=(64, 128, 256), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=256,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4,
    )  # fmt: skip
    StableDiffusionPipeline(
        vae=vae, text_encoder=CLIPTextModel(config), tokenizer=CLIPTokenizer("clip/vocab.json", "clip/merges.txt"),
        unet=unet, scheduler=DDPMScheduler(beta_schedule="scaled_linear"), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip


def captions(folder: str, *columns: str, count: int = 16, size: int = 64) -> None:
    """Write pictures with captions as an image folder; further columns are pictures as well."""
    images(folder, count=count, size=size)
    lines = []
    for number in range(count):
        row = {"file_name": f"{number:04d}.png", "text": "a picture"}
        row |= dict.fromkeys(columns, f"{number:04d}.png")
        lines.append(json.dumps(row))
    Path(folder, "metadata.jsonl").write_text("\n".join(lines))


def parquet(path: str, columns: str, count: int = 64, size: int = 64) -> None:
    """Write a Parquet file whose columns are ``name=image`` or ``name=text``, separated by spaces."""
    import io

    from datasets import Dataset, Features, Image, Value
    from PIL import Image as Picture

    buffer = io.BytesIO()
    Picture.fromarray(pixels(size, size, 3)).save(buffer, "png")
    named = dict(column.split("=") for column in columns.split())
    values = {"image": {"bytes": buffer.getvalue(), "path": None}, "text": sentence(8)}
    features = Features({name: Image() if kind == "image" else Value("string") for name, kind in named.items()})
    table = {name: [values[kind]] * count for name, kind in named.items()}
    Dataset.from_dict(table, features=features).to_parquet(str(_parent(path)))


def _graph(nodes: int, edges: int) -> Iterator[tuple[int, int]]:
    yield from map(tuple, np.random.default_rng(0).integers(0, nodes, (edges, 2)).tolist())


def planetoid(root: str) -> None:
    """Write Cora's raw files in Planetoid's form, with its published sizes and edges at random."""
    from scipy.sparse import csr_matrix

    folder = Path(root, "Cora", "raw")
    folder.mkdir(parents=True)
    features = csr_matrix(np.random.default_rng(0).random((2708, 1433), dtype=np.float32) < 0.0127, dtype=np.float32)
    labels = np.eye(7, dtype=np.int32)[np.arange(2708) % 7]
    graph: dict[int, list[int]] = {node: [] for node in range(2708)}
    for source, target in _graph(2708, 5278):
        graph[source].append(target)
        graph[target].append(source)
    parts = {
        "x": features[:140], "y": labels[:140], "allx": features[:1708], "ally": labels[:1708], "tx": features[1708:],
        "ty": labels[1708:], "graph": graph,
    }  # fmt: skip
    for name, part in parts.items():
        Path(folder, f"ind.cora.{name}").write_bytes(pickle.dumps(part))
    Path(folder, "ind.cora.test.index").write_text("\n".join(str(node) for node in range(1708, 2708)) + "\n")


def cora(folder: str) -> None:
    """Write Cora as two tables, with its published sizes and edges at random."""
    Path(folder).mkdir(parents=True)
    bits = np.random.default_rng(0).random((2708, 1433)) < 0.0127
    nodes = [f"{n} {' '.join(map(str, row.astype(int)))} class{n % 7}" for n, row in enumerate(bits)]
    Path(folder, "cora.content").write_text("\n".join(nodes))
    Path(folder, "cora.cites").write_text("\n".join(f"{a} {b}" for a, b in _graph(2708, 5429)))


def graphs(root: str, name: str, count: int = 188, nodes: int = 18, kinds: int = 7) -> None:
    """Write a dataset of small graphs in the form of TUDataset."""
    folder = Path(root, name, "raw")
    folder.mkdir(parents=True)
    edges = [(n + nodes * g, m + nodes * g) for g in range(count) for n, m in _graph(nodes, 20)]
    edges += [(target, source) for source, target in edges]
    write = {
        "A": [f"{a + 1}, {b + 1}" for a, b in edges],
        "graph_indicator": [str(g + 1) for g in range(count) for _ in range(nodes)],
        "graph_labels": [str(g % 2) for g in range(count)],
        "node_labels": [str(n % kinds) for _ in range(count) for n in range(nodes)],
    }
    for part, lines in write.items():
        Path(folder, f"{name}_{part}.txt").write_text("\n".join(lines) + "\n")


def speech(folder: str, count: int = 16, seconds: float = 2.0) -> None:
    """Write sound at random with a line of text each, as an audio folder."""
    import soundfile

    lines = []
    for split in ("train", "validation"):
        Path(folder, split).mkdir(parents=True)
        lines = []
        for number in range(count):
            sound = np.random.default_rng(number).normal(0, 0.1, int(16000 * seconds))
            soundfile.write(Path(folder, split, f"{number}.wav"), sound, 16000)
            lines.append(json.dumps({"file_name": f"{number}.wav", "text": "ab ba", "label": str(number % 2)}))
        Path(folder, split, "metadata.jsonl").write_text("\n".join(lines))


def litgpt(folder: str, name: str) -> None:
    """Save a checkpoint of LitGPT with values at random, and a tokenizer."""
    import torch
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    tokenizer(folder)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(named))
    config = Config.from_name(name)
    save_config(config, Path(folder))
    torch.save(GPT(config).state_dict(), Path(folder, "lit_model.pth"))


def no_tokenizer() -> None:
    """Write a module in place of tiktoken, which downloads what it knows: text is not read before training ends."""
    Path("tiktoken.py").write_text(
        "class Encoding:\n    eot_token = 50256\n\n    def __getattr__(self, name):\n        "
        "return lambda *_, **__: [0]\n\n\ndef get_encoding(name):\n    return Encoding()\n"
    )


def style_network(root: str) -> None:
    """Save VGG-16 with values at random where torch.hub looks for the published ones."""
    import torch
    from torchvision.models import vgg16

    folder = Path(root, "hub", "checkpoints")
    folder.mkdir(parents=True)
    torch.save(vgg16().state_dict(), folder / "vgg16-397923af.pth")
