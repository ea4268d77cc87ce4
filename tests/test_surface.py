"""What users hold on to, as it was before the packages were cut anew (surface.json): nothing of it may go away."""

import importlib
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

import hybridtrain
import hybridtrain.virtual_gpu
from hybridtrain.hybrid.config import HybridConfig
from hybridtrain.models.model_config import PRESETS, ModelConfig
from hybridtrain.optim import OPTIMIZERS
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.plan.memory_plan import SETTINGS
from hybridtrain.training_file import TrainFile
from hybridtrain.virtual_gpu import Card, card_catalogue

REPOSITORY = Path(__file__).parents[1]
SURFACE = Path(__file__).with_name("surface.json")


RENAMED = {"hybridtrain.fit(question)", "hybridtrain.recommend(question)"}
"""First arguments, which everybody gives by place."""


def surface() -> dict[str, list[str]]:
    """Return every name that somebody may have written down: a list for each kind."""
    return {
        "verbs and options": sorted(_options()),
        "functions and classes": sorted(_api()),
        "settings of training files": sorted(_keys(TrainFile)),
        "settings of models": sorted(_keys(ModelConfig)),
        "settings of hybrid training": sorted(_keys(HybridConfig)),
        "settings of cards": sorted(_keys(Card)),
        "optimizations": sorted(_kinds(OPTIMIZATIONS)),
        "optimizers": sorted(_kinds(OPTIMIZERS)),
        "plans": sorted(SETTINGS),
        "presets": sorted(PRESETS),
        "cards": sorted(card_catalogue()),
        "scenarios": sorted(path.stem for path in (REPOSITORY / "scenarios").glob("*.toml")),
        "stacks": sorted(path.stem for path in (REPOSITORY / "scenarios" / "stacks").glob("*.toml")),
        "sessions": sorted(_sessions()),
    }


def _options() -> Iterator[str]:
    app = importlib.import_module("hybridtrain.cli.main").APP
    for name in app:
        if name.startswith("-") or name == "--install-completion":
            continue
        yield name
        for argument in app[name].assemble_argument_collection(default_parameter=app.default_parameter):
            yield from (f"{name} {option}" for option in argument.names if option != "*")


def _api() -> Iterator[str]:
    for package in (hybridtrain, hybridtrain.virtual_gpu):
        for name in filter(str.isidentifier, {*dir(package), *getattr(package, "_OLD_NAMES", ())}):
            thing = getattr(package, name)
            yield f"{package.__name__}.{name}"
            if callable(thing) and not (isinstance(thing, type) and issubclass(thing, Exception)):
                parameters = inspect.signature(thing).parameters
                yield from (
                    f"{package.__name__}.{name}({parameter})" for parameter in parameters if parameter[0] != "_"
                )


def _kinds(catalogue: Mapping[str, type]) -> Iterator[str]:
    for kind, found in catalogue.items():
        yield kind
        yield from (f"{kind}.{key}" for key in _keys(found))


def _keys(found: type) -> Iterator[str]:
    hints = get_type_hints(found)
    for field in fields(found):  # type: ignore[arg-type]
        yield field.name
        for part in _parts(hints[field.name]):
            yield from (f"{field.name}.{key}" for key in _keys(part))


def _parts(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    elif get_origin(hint) in {Union, UnionType}:
        for one in get_args(hint):
            yield from _parts(one)


def _sessions() -> Iterator[str]:
    tree = (REPOSITORY / "noxfile.py").read_text(encoding="utf-8").splitlines()
    for line, following in pairwise(tree):
        if line.startswith("@nox.session") and following.startswith("def "):
            yield following.removeprefix("def ").partition("(")[0]


def test_every_verb_option_setting_and_name_of_before_is_there() -> None:
    now = surface()
    gone = {
        kind: sorted(set(names) - set(now[kind]) - RENAMED)
        for kind, names in json.loads(SURFACE.read_text(encoding="utf-8")).items()
    }
    assert not {kind: names for kind, names in gone.items() if names}
