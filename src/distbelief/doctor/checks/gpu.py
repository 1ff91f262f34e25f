"""Checks the GPUs that torch sees: their memory, their results, and their counted memory errors."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from distbelief.doctor.rules.report import Finding, megabytes, ok, problem, skipped

_SIZE = 512
_LEAST_FREE = 0.1
_QUERY = "index,temperature.gpu,ecc.errors.uncorrected.volatile.total"
_HOT = 90


@dataclass(frozen=True)
class Gpu:
    number: int
    name: str
    total: int = 0
    free: int = 0
    wrong: int = 0
    """The number of wrong elements in a matrix product."""
    error: str = ""
    temperature: int = -1
    ecc_errors: int = -1
    """Uncorrectable memory errors since the last start; -1: unknown."""


def probe() -> list[Gpu]:
    try:
        import torch

        if not torch.cuda.is_available():
            return []
        health = _health()
        return [_one(number, *health.get(number, (-1, -1))) for number in range(torch.cuda.device_count())]
    except Exception as error:  # a broken driver raises errors of many kinds
        return [Gpu(0, "GPU", error=f"{type(error).__name__}: {error}".splitlines()[0])]


def _one(number: int, temperature: int, ecc_errors: int) -> Gpu:
    import torch

    name = torch.cuda.get_device_name(number)
    try:
        free, total = torch.cuda.mem_get_info(number)
        # Small whole numbers make every sum exact, also in TF32, so that any other bit is a fault.
        left = torch.arange(_SIZE * _SIZE, dtype=torch.float32).remainder(4).reshape(_SIZE, _SIZE)
        right = torch.arange(_SIZE * _SIZE, dtype=torch.float32).remainder(3).reshape(_SIZE, _SIZE)
        there = (left.to(number) @ right.to(number)).cpu()
        wrong = int((there != left @ right).sum())
    except RuntimeError as error:
        return Gpu(number, name, error=str(error).splitlines()[0], temperature=temperature, ecc_errors=ecc_errors)
    return Gpu(number, name, total, free, wrong, "", temperature, ecc_errors)


def _health() -> dict[int, tuple[int, int]]:
    """GPU -> (temperature, memory errors), as far as nvidia-smi reports them."""
    if not shutil.which("nvidia-smi"):
        return {}
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0].isdigit():
            found[int(fields[0])] = (_number(fields[1]), _number(fields[2]))
    return found


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1


def judge(found: list[Gpu]) -> list[Finding]:
    return [_judge(gpu) for gpu in found] or [skipped("GPU", "torch sees none")]


def _judge(gpu: Gpu) -> Finding:
    about = f"GPU {gpu.number}"
    replace = "take it out of service (CUDA_VISIBLE_DEVICES), and have it looked at: see `dmesg` and `nvidia-smi -q`"
    if gpu.error:
        return problem(about, f"{gpu.name} does not work: {gpu.error}", replace)
    if gpu.wrong:
        return problem(about, f"{gpu.name} computes wrong: {gpu.wrong} numbers of a product of {_SIZE}²", replace)
    text = f"{gpu.name}, {megabytes(gpu.free)} of {megabytes(gpu.total)} free, computes right"
    if gpu.temperature >= 0:
        text += f", {gpu.temperature} °C"
    if gpu.ecc_errors >= 0:
        text += f", {gpu.ecc_errors} memory errors"
    if gpu.ecc_errors > 0:
        return problem(about, text, "reset it (nvidia-smi -r) or restart the machine; if they come back, replace it")
    if gpu.temperature > _HOT:
        return problem(about, text, "it is too hot and runs slower: look after the cooling")
    if gpu.free < _LEAST_FREE * gpu.total:
        return problem(about, text, "other processes have its memory: see `nvidia-smi`")
    return ok(about, text)
