# mypy: disable-error-code="no-untyped-call"
"""Convolutional models as others train them: residual networks of pictures and videos, an FCN, a U-Net.

N samples, F frames, C channels, S pixels of a side. A run is described by its model, batch and picture. Models, losses
and the loop are rewritten here; ranks share gradients by torch's DistributedDataParallel without views of its buckets.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu
from hybridvalidation.engines.rank_peaks import rank_peaks

_STEPS = 3
_BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def plan(common: Mapping[str, Any], config: Mapping[str, Any], card: str) -> dict[str, float]:
    """Return the largest allocated and reserved bytes of a rank, over three steps."""
    settings = {**common, **config}
    gpu = VirtualGpu(find_card(settings.get("card", card)), world=settings["world"])
    return rank_peaks(gpu, lambda: _train(settings))


def _train(settings: Mapping[str, Any]) -> None:
    model = _MODELS[settings["model"]](settings).cuda()
    if settings["sync_norm"]:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if settings["norm_eval"]:
        for module in model.modules():
            module.train(not isinstance(module, nn.modules.batchnorm._BatchNorm))
    called = DistributedDataParallel(model, device_ids=[0], broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, foreach=False)
    scaler = torch.amp.GradScaler("cuda", enabled=settings["amp"])
    for _ in range(_STEPS):
        samples = torch.randn(settings["input"]).cuda()
        labels = torch.zeros(settings["labels"], dtype=torch.int64).cuda()
        with torch.autocast("cuda", dtype=torch.float16) if settings["amp"] else nullcontext():
            loss = called(samples, labels)
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss).backward()
        if settings["clips"]:
            nn.utils.clip_grad_norm_(model.parameters(), 40.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()


class ConvNorm(nn.Sequential):
    """A convolution without bias, its norm and, unless told otherwise, a rectifier in place; of 2 or 3 dimensions."""

    def __init__(
        self, inputs: int, outputs: int, kernel: Sequence[int], stride: Sequence[int], dilation: int = 1, *,
        acts: bool = True,
    ) -> None:  # fmt: skip
        dilations = [dilation if size > 1 else 1 for size in kernel]
        padding = [spread * (size // 2) for spread, size in zip(dilations, kernel, strict=True)]
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if len(kernel) == 2 else (nn.Conv3d, nn.BatchNorm3d)
        made = conv(inputs, outputs, kernel, stride, padding, dilations, bias=False)  # type: ignore[arg-type]
        super().__init__(made, norm(outputs), *([nn.ReLU(inplace=True)] if acts else []))


class Residual(nn.Module):
    """A bottleneck of a residual network; in 3D its first kernel may span three frames."""

    def __init__(
        self, inputs: int, width: int, stride: int, dilation: int, dims: int, *, inflated: bool, in_place: bool
    ) -> None:
        super().__init__()
        one, three = ([1, 1], [3, 3]) if dims == 2 else ([1, 1, 1], [1, 3, 3])
        strides = [1] * (dims - 2) + [stride] * 2
        first = [3, 1, 1] if inflated else one
        self.conv1 = ConvNorm(inputs, width, first, [1] * dims)
        self.conv2 = ConvNorm(width, width, three, strides, dilation)
        self.conv3 = ConvNorm(width, 4 * width, one, [1] * dims, acts=False)
        differs = stride != 1 or inputs != 4 * width
        self.downsample = ConvNorm(inputs, 4 * width, one, strides, acts=False) if differs else None
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out = self.conv3(self.conv2(self.conv1(x)))
        kept = x if self.downsample is None else self.downsample(x)
        if self.in_place:
            out += kept
        else:
            out = out + kept
        return functional.relu(out, inplace=True)


class ResNet(nn.Module):
    """A residual network without its classifier; returns the outputs of its last two stages."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        dims, dilations = settings["dims"], settings["dilations"]
        frames = dims - 2
        self.stem = ConvNorm(
            settings["channels"], 64, [*settings["stem_frames"], 7, 7], [*settings["stem_stride"], 2, 2]
        )
        pool: Any = nn.MaxPool2d if dims == 2 else nn.MaxPool3d
        self.pool: nn.Module = pool([1] * frames + [3, 3], [*settings["pool_stride"], 2, 2], [0] * frames + [1, 1])
        self.halves = nn.MaxPool3d((2, 1, 1)) if settings["halves_frames"] else nn.Identity()
        self.stages = nn.ModuleList()
        inputs = 64
        for stage, count in enumerate(_BLOCKS[settings["depth"]]):
            width, blocks = 64 * 2**stage, []
            for number in range(count):
                is_first = number == 0
                stride = 2 if is_first and stage and dilations[stage] == 1 else 1
                dilation = dilations[stage - 1] if is_first and stage else dilations[stage]
                inflated = dims == 3 and bool(settings["inflate"][stage][number])
                blocks.append(
                    Residual(
                        inputs, width, stride, dilation, dims, inflated=inflated, in_place=settings["adds_in_place"]
                    )
                )
                inputs = 4 * width
            self.stages.append(nn.Sequential(*blocks))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features of the third and the fourth stage."""
        x = self.halves(self.stages[0](self.pool(self.stem(x))))
        third = self.stages[2](self.stages[1](x))
        return third, self.stages[3](third)


class Recognizer(nn.Module):
    """A classifier of pictures, clips, or segments of which the features are averaged."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.segments = settings["segments"]
        self.backbone = ResNet(settings)
        self.dropout = nn.Dropout(0.5)
        self.classifier = nn.Linear(2048, settings["classes"])
        self.is_binary = settings["binary"]

    def forward(self, samples: Tensor, labels: Tensor) -> Tensor:
        """Return the loss; samples are [N * segments, C, (F,) S, S]."""
        x = self.backbone(samples)[1]
        pool = functional.adaptive_avg_pool2d if x.dim() == 4 else functional.adaptive_avg_pool3d
        x = pool(x, 1).flatten(1).unflatten(0, (-1, self.segments)).mean(1)
        scores = self.classifier(self.dropout(x))
        if self.is_binary:
            return functional.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores))
        return functional.cross_entropy(scores, labels)


def _head(inputs: int, width: int, classes: int, *drop: nn.Module) -> nn.Sequential:
    return nn.Sequential(ConvNorm(inputs, width, [3, 3], [1, 1], acts=False), *drop, nn.Conv2d(width, classes, 1))


class Segmenter(nn.Module):
    """Torchvision's FCN: a dilated residual network, a head, and another that helps at half the weight."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.backbone = ResNet(settings)
        count = settings["classes"]
        self.main, self.helper = (_head(width, width // 4, count, nn.ReLU(), nn.Dropout(0.1)) for width in (2048, 1024))

    def forward(self, samples: Tensor, labels: Tensor) -> Tensor:
        """Return the loss; labels are [N, S, S]."""
        third, fourth = self.backbone(samples)
        size = samples.shape[-2:]
        main = functional.interpolate(self.main(fourth), size=size, mode="bilinear", align_corners=False)
        helper = functional.interpolate(self.helper(third), size=size, mode="bilinear", align_corners=False)
        self.outputs = [main, helper]  # the loop that is played holds them until the next step's are there
        criterion = functional.cross_entropy
        loss: Tensor = criterion(main, labels, ignore_index=255) + 0.5 * criterion(helper, labels, ignore_index=255)
        return loss


class UNet(nn.Module):
    """Five levels of two convolutions; the way up resizes, joins and convolves. Heads at the last two levels."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        widths = [64 * 2**level for level in range(5)]
        self.down = nn.ModuleList(_pair(inputs, width) for inputs, width in zip([3, *widths], widths, strict=False))
        ups = widths[:-1]
        self.narrow = nn.ModuleList(ConvNorm(2 * width, width, [1, 1], [1, 1]) for width in ups)
        self.up = nn.ModuleList(_pair(2 * width, width) for width in ups)
        count = settings["classes"]
        self.main, self.helper = (
            _head(width, 64, count, nn.ReLU(inplace=True), nn.Dropout2d(0.1)) for width in (64, 128)
        )

    def forward(self, samples: Tensor, labels: Tensor) -> Tensor:
        """Return the loss; labels are [N, S, S]."""
        kept, x = [], samples
        for level, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        outs = []
        for level in reversed(range(4)):
            wide = functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = self.up[level](torch.cat([kept[level], self.narrow[level](wide)], dim=1))
            outs.append(x)
        size = samples.shape[-2:]
        main = functional.interpolate(self.main(outs[-1]), size=size, mode="bilinear", align_corners=False)
        helper = functional.interpolate(self.helper(outs[-2]), size=size, mode="bilinear", align_corners=False)
        loss: Tensor = _pixel_loss(main, labels) + 0.4 * _pixel_loss(helper, labels)
        return loss


def _pair(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(ConvNorm(inputs, width, [3, 3], [1, 1]), ConvNorm(width, width, [3, 3], [1, 1]))


def _pixel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, reduction="none", ignore_index=255).mean()


_MODELS: dict[str, type[nn.Module]] = {"recognizer": Recognizer, "segmenter": Segmenter, "unet": UNet}
