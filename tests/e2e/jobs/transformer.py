"""A model of the Transformers library, built from a config: `--set kind=gpt2` or `bert`. No download."""

import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from distbelief import Job

SYMBOLS, LENGTH = 64, 12


def model(kind: str) -> torch.nn.Module:
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=SYMBOLS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, use_cache=False)
        )
    return BertForMaskedLM(
        BertConfig(
            vocab_size=SYMBOLS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
        )
    )


def loss(output: object, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = output.logits  # type: ignore[attr-defined]
    return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten().roll(-1))


def job(kind: str = "gpt2", steps: int = 6) -> Job:
    generator = torch.Generator().manual_seed(0)
    return Job(
        name=kind,
        model=lambda: model(kind),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        data={"input_ids": torch.randint(0, SYMBOLS, (50, LENGTH), generator=generator)},
        global_batch=14,
        shards=4,
        steps=steps,
        clip_norm=1.0,
    )
