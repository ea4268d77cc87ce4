from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridtrain.data.pinned_corpus import PINNED
from hybridtrain.errors import ConfigError
from hybridvalidation.study.protocol import BASELINE, StudyFile, StudyRun, run_key
from hybridvalidation.study.trials import StudyJob, run_study_job
from tiny_studies import METHOD, study_of

METHODS: list[dict[str, Any]] = [
    METHOD,
    {"name": "muon", "description": "orthogonalized momentum", "muon": {}},
    {"name": "slow-muon", "description": "with less momentum", "muon": {"momentum": 0.5}},
    {"name": "jumping", "description": "linear on top", "muon": {}, "hybrid": {"predictor": "linear", "full_steps": 3}},
]


@pytest.fixture(scope="module")
def study() -> StudyFile:
    return study_of(methods=METHODS, corpus="pinned")


def run_of(method: str) -> StudyRun:
    return StudyRun(method=method, lr=0.01, beta1=0.9, beta2=0.99, seed=0, num_steps=12)


def test_muon_takes_adamws_place_and_can_jump(study: StudyFile) -> None:
    torch.set_num_threads(1)
    made = {
        name: run_study_job(StudyJob(study=study, run=run_of(name)))
        for name in (BASELINE, "muon", "slow-muon", "jumping")
    }
    assert len({record.validation_loss for record in made.values()}) == 4
    assert made["jumping"].cost > made["muon"].cost, "probes count"
    assert {record.corpus_digest for record in made.values()} == {PINNED["sympy"][1]}


def test_what_is_at_its_default_leaves_keys_as_they_were(study: StudyFile) -> None:
    old = study_of()
    run = StudyRun(method="slow_gradient", lr=0.01, beta1=0.9, beta2=0.99, seed=0, num_steps=12)
    assert run_key(old, run) == "ed3ea2df8e073e15", "as before there was a choice of text or Muon"
    assert run_key(study, run) != run_key(old, run), "another text"
    assert run_key(study, run_of("muon")) != run_key(study, replace(run_of("muon"), method="slow-muon"))


def test_two_optimizers_are_refused() -> None:
    with pytest.raises(ConfigError, match="muon, slow: both replace AdamW;"):
        study_of(methods=[METHOD, {"name": "both", "description": "-", "muon": {}, "slow": {}}])
