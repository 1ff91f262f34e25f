"""local_sgd: the same weights on any number of workers and through deaths, and those of a plain loop written here."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from distbelief.shards import shard_seed
from tests.e2e.jobs import plain
from tests.support.runs.command import JOBS, Outcome, Run
from tests.support.runs.plainloop import clip_weights, samples_of, seed_all, tree_sum
from tests.support.runs.reference import undisturbed
from tests.support.runs.saved import sealed
from tests.support.runs.watched import Watched

Start = Callable[..., Run]
Cli = Callable[..., Outcome]
Wait = Callable[[Callable[[], object]], None]

SMALL = [JOBS / "small.py", "--set", "brake_s=0.02", "--set", "shards=8", "--set", "steps=403"]


@pytest.fixture
def watched(start: Start, tmp_path: Path, wait_until: Wait) -> Callable[..., Watched]:
    return lambda *arguments: Watched(start, tmp_path, wait_until, *arguments)


@pytest.mark.parametrize(
    ("ways", "evaluated"),
    [
        # Due every 6 steps and at the end; there is a state after every 4.
        ([["--workers", 3, "--strategy", "local_sgd:4"]], [8, 12, 15]),
        (
            [
                ["--shares", "1,3", "--strategy", "local_sgd:4:nesterov:gloo"],
                ["--workers", 5, "--strategy", "local_sgd:4:nesterov"],  # one is a spare
            ],
            [8, 12, 15],
        ),
        (
            [
                ["--workers", 1, "--strategy", "local_sgd:4:bf16:gloo"],
                ["--workers", 2, "--strategy", "local_sgd:4:bf16"],
                ["--workers", 3, "--strategy", "local_sgd:4:bf16:gloo"],
            ],
            [8, 12, 15],
        ),
        # In rounds that are an epoch's last batch, some replicas have no samples.
        (
            [["--workers", 4, "--strategy", "local_sgd:1"], ["--workers", 3, "--strategy", "local_sgd:1:gloo"]],
            [6, 12, 15],
        ),
    ],
    ids=["average", "nesterov", "compressed", "idle replicas"],
)
def test_same_weights_on_any_number_of_workers(
    distbelief: Cli, tmp_path: Path, ways: list[list[object]], evaluated: list[int]
) -> None:
    """With everything in the job that makes exactness hard; 15 steps, so that the last round is shorter."""
    hashes = set()
    for number, way in enumerate(ways):
        folder = tmp_path / str(number)
        result = distbelief("train", JOBS / "everything.py", *way, "--run-dir", folder, "--json").json
        hashes.add((result["weights_sha256"], str(result["metrics"]), result["steps"]))
        sends = "bf16:gloo" in str(way) and 1 not in way
        assert (result["wire_ratio"] is not None) == sends, "neither one worker sends anything, nor do some that share"
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(15))
        assert [line["step"] for line in lines if line["kind"] == "evaluation"] == evaluated
    assert len(hashes) == 1, hashes
    strategy = str(ways[0][-1]).removesuffix(":gloo")
    assert hashes.pop()[0] == undisturbed(JOBS / "everything.py", strategy=strategy)


def plain_local_loop(model: torch.nn.Module, local: int, replicas: int) -> list[float]:
    """DiLoCo over the job's shards, with no code of ours but the order of samples and the seeds. Returns the losses."""
    parameters, each = list(model.parameters()), plain.SHARDS // replicas
    floats = [b for b in model.buffers() if b.is_floating_point()]
    inner = [torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.05, fused=True) for _ in range(replicas)]
    outer = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True, fused=True)
    losses = []
    for first in range(0, plain.STEPS, local):
        steps = range(first, min(first + local, plain.STEPS))
        start = {name: value.clone() for name, value in model.state_dict().items()}
        differences, buffers, counted = [], [], []
        sums, counts = dict.fromkeys(steps, 0.0), dict.fromkeys(steps, 0)
        for replica, optimizer in enumerate(inner):
            model.load_state_dict(start)
            for step in steps:
                before = [b.clone() for b in model.buffers()]
                gradients, after, count = [], [], 0
                for shard in range(replica * each, (replica + 1) * each):
                    index = samples_of(step, shard)
                    if len(index) == 0:
                        continue
                    for buffer, value in zip(model.buffers(), before, strict=True):
                        buffer.copy_(value)
                    seed_all(shard_seed(plain.SEED, step, shard))
                    optimizer.zero_grad(set_to_none=True)
                    loss = F.cross_entropy(model(plain.X[index]), plain.Y[index]) * len(index)
                    loss.backward()
                    gradients.append([p.grad for p in parameters])
                    after.append([b.clone() for b in floats])
                    sums[step] += loss.item()
                    count += len(index)
                counts[step] += count
                if not count:  # the last batch of an epoch has samples for the first replicas only
                    continue
                for buffer, total in zip(floats, tree_sum(after), strict=True):
                    buffer.copy_(total / len(after))
                for parameter, total in zip(parameters, tree_sum(gradients), strict=True):
                    parameter.grad = total * (1.0 / count)
                norm = sum(float(p.grad.double().square().sum()) for p in parameters) ** 0.5
                for parameter in parameters:
                    parameter.grad.mul_(min(1.0, plain.CLIP / (norm + 1e-6)))
                optimizer.param_groups[0]["lr"] = 5e-3 * plain.rate(step)
                optimizer.step()
                clip_weights(model)
            named = dict(model.named_parameters())
            differences.append([(start[name] - value.detach()) for name, value in named.items()])
            buffers.append([b.clone() for b in floats])
            counted.append(model.norm.num_batches_tracked.clone())
        model.load_state_dict(start)
        for parameter, total in zip(parameters, tree_sum(differences), strict=True):
            parameter.grad = total * (1.0 / replicas)
        outer.step()
        clip_weights(model)
        for buffer, total in zip(floats, tree_sum(buffers), strict=True):
            buffer.copy_(total / replicas)
        model.norm.num_batches_tracked.copy_(counted[0])
        losses += [sums[step] / counts[step] for step in steps]
    return losses


def test_the_same_bits_as_a_plain_loop(distbelief: Cli, tmp_path: Path) -> None:
    seed_all(plain.SEED)
    model = plain.Net().train()
    losses = plain_local_loop(model, local=4, replicas=4)
    how = ["--strategy", "local_sgd:4:replicas=4:nesterov", "--workers", 3]
    distbelief("train", JOBS / "plain.py", *how, "--run-dir", tmp_path / "run", "--json").json  # noqa: B018
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(weights[name], value), f"{name} differs by {(weights[name] - value).abs().max()}"
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["loss"] for line in lines if line["kind"] == "step"] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_the_same_weights_when_workers_are_killed(watched: Callable[..., Watched], transport: str) -> None:
    hold = ["--set", "hold_step=100"]  # the last newcomer must have joined before the end
    run = watched(*SMALL, *hold, "--strategy", f"local_sgd:8:nesterov:{transport}", "--workers", 3)
    for steps, place in ((8, 1), (32, 0), (56, 2)):
        run.after(steps)
        run.has_members(3)
        run.signal(run.living()[place], signal.SIGKILL)
        run.after(steps + 16)
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL, strategy="local_sgd:8:nesterov")
    assert result["recoveries"] >= 2
    said = [notice["text"] for notice in run.metrics("notice")]
    back = [text for text in said if text.startswith("goes back to the last outer step, after step ")]
    assert back, said
    assert all(int(text.split(":")[0].rpartition(" ")[2]) % 8 == 0 for text in back), back
    assert result["reexecuted"] == 0  # no step that was committed


def test_all_workers_of_the_host_killed_at_once(watched: Callable[..., Watched]) -> None:
    """The engine keeps their memory, so nothing but the present round is lost."""
    run = watched(*SMALL, "--strategy", "local_sgd:8:nesterov:shm", "--workers", 3)
    run.after(24)
    run.kill_all()
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL, strategy="local_sgd:8:nesterov")
    assert result["reexecuted"] == 0


def test_two_neighbours_without_shared_memory_go_back_to_a_checkpoint(watched: Callable[..., Watched]) -> None:
    """They alone had a replica's optimizer state."""
    how = ["--strategy", "local_sgd:8:nesterov:gloo", "--workers", 3, "--save-every", 16]
    run = watched(*SMALL, "--set", "hold_step=59", *how)
    run.after(56)  # the members are in a round that began after a checkpoint was made, and stay in it
    run.wait_until(lambda: 48 in sealed(run.folder))
    run.kill(sorted(run.members())[:2])
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL, strategy="local_sgd:8:nesterov")
    (back,) = run.metrics("rollback")
    assert (back["source"], back["step"], back["reached"]) == ("checkpoint", 48, 56)


def test_without_copies_one_death_goes_back_and_says_so(watched: Callable[..., Watched]) -> None:
    how = ["--strategy", "local_sgd:8:nesterov:gloo:nocopies", "--workers", 2, "--save-every", "never"]
    run = watched(*SMALL, *how)
    run.after(24)
    run.signal(min(run.members()), signal.SIGKILL)
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL, strategy="local_sgd:8:nesterov")
    (back,) = run.metrics("rollback")
    assert (back["source"], back["step"], back["reached"] >= 24) == ("where the run began", 0, True)


@pytest.mark.parametrize(("first", "then"), [("shm", "gloo"), ("gloo", "shm")])
def test_a_stopped_run_is_resumed_to_the_same_weights(
    watched: Callable[..., Watched], start: Start, first: str, then: str
) -> None:
    run = watched(*SMALL, "--strategy", f"local_sgd:8:nesterov:{first}", "--workers", 2)
    run.after(24)
    run.run.signal(signal.SIGINT)
    outcome = run.run.wait()
    (checkpoint,) = run.metrics("checkpoint")
    assert checkpoint["step"] % 8 == 0, outcome
    run.release()
    again = start("resume", "run", "--workers", 3, "--strategy", f"local_sgd:8:nesterov:{then}", "--json").wait()
    assert again.json["weights_sha256"] == undisturbed(*SMALL, strategy="local_sgd:8:nesterov")
    assert sorted(run.lasting_steps()) == list(range(403))


def test_compressed_differences_survive_a_kill_and_a_resume(
    watched: Callable[..., Watched], start: Start, tmp_path: Path
) -> None:
    """What replicas owe is taken over (over gloo by way of copies) and saved: the weights are those of one worker."""
    job = [JOBS / "small.py", "--set", "brake_s=0.02", "--set", "shards=8", "--set", "steps=200"]
    strategy = "local_sgd:8:nesterov:replicas=3:int8"
    run = watched(*job, "--strategy", f"{strategy}:gloo:copies", "--workers", 3)
    run.after(16)
    run.has_members(3)
    run.signal(run.living()[1], signal.SIGKILL)
    run.after(40)
    run.run.signal(signal.SIGINT)
    run.run.wait()
    assert run.metrics("rollback") == []
    run.release()
    again = start("resume", "run", "--workers", 2, "--strategy", f"{strategy}:gloo", "--json").wait().json
    assert again["weights_sha256"] == undisturbed(*job, strategy=strategy)
    assert 0 < again["wire_ratio"] < 0.5, "three replicas' codes of a quarter, where two partial sums went"


def test_verify(distbelief: Cli) -> None:
    job = [JOBS / "small.py", "--set", "shards=8"]
    against_plain = distbelief("verify", *job, "--strategy", "local_sgd:5:nesterov:lr=0.5:topk=0.1", "--json")
    assert against_plain.json["verdict"] == "identical"
    one = ["--strategy", "local_sgd:1:replicas=1", "--against", "allreduce", "--tolerance", "1e-6"]
    assert distbelief("verify", *job, *one, "--json").json["verdict"] in ("identical", "equal")


def test_more_replicas_than_shards_is_one_clear_error(distbelief: Cli) -> None:
    outcome = distbelief("train", JOBS / "small.py", "--strategy", "local_sgd:4:replicas=5", "--workers", 2)
    assert outcome.status != 0
    assert "5 replicas are more than the 4 shards of a step" in outcome.stderr + outcome.stdout
    assert "Traceback" not in outcome.stderr + outcome.stdout


def test_a_run_of_local_sgd_is_not_replayed_and_that_is_said(distbelief: Cli) -> None:
    distbelief("train", JOBS / "small.py", "--strategy", "local_sgd:4", "--workers", 1, "--run-dir", "run")
    outcome = distbelief("replay", "run", "--step", 3)
    assert outcome.status != 0
    assert "local_sgd" in outcome.stderr
    assert "Traceback" not in outcome.stderr
