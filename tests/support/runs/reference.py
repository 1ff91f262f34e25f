"""What a run must come to: the weights of one plain process, made here (verification/plain.py). No engine, worker or
transport has a part in it, and nothing needs to be started for it."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from distbelief.checkpoint.weights import weights_sha256
from distbelief.data.sources import seed_everything
from distbelief.strategies import parse
from distbelief.strategies.localsgd.strategy import LocalSGD
from distbelief.verification.plain import make_model, train_plainly
from distbelief.verification.plainlocal import train_locally
from distbelief.worker.jobfile import load_job


def undisturbed(job: object, *settings: object, strategy: str = "allreduce") -> str:
    """The hash of the weights of a run to which nothing happens: a job file, and its settings as a command line has
    them. How slow it is made makes no difference."""
    return weights_sha256(undisturbed_model(job, *settings, strategy=strategy))


def undisturbed_model(job: object, *settings: object, strategy: str = "allreduce") -> torch.nn.Module:
    values = [str(one) for one in settings if one != "--set" and not str(one).startswith("brake_s=")]
    return _trained(Path(str(job)), tuple(sorted(values)), strategy)


@functools.cache
def _trained(path: Path, settings: tuple[str, ...], strategy: str) -> torch.nn.Module:
    seed_everything(0)  # as in runs
    job = load_job(path, dict(one.split("=", 1) for one in settings))
    model, how = make_model(job), parse(strategy)
    for _ in train_locally(job, model, how) if isinstance(how, LocalSGD) else train_plainly(job, model):
        pass
    return model
