"""Compression as an option of a strategy: `bf16`, `int8`, `int8=256`, `topk=0.01`, `powersgd=4`. Without torch.

A colon parts the options of a strategy, so here a number follows an equals sign; `spec` has the longer form.
"""

from __future__ import annotations

from distbelief.compression.limits import check_block, check_fraction, check_rank
from distbelief.errors import JobError

NAMES = ("bf16", "int8", "topk", "powersgd")
KNOWN = "known are bf16, int8, topk=0.01 and powersgd=4"
_USUAL = {"int8": 1024, "powersgd": 4}


def canonical(text: str) -> str:
    """The option as it is always written, or an error that says what is wrong with it.

    >>> [canonical(text) for text in ("bf16", "int8=1024", "int8:block=256", "topk=1e-2", "powersgd")]
    ['bf16', 'int8', 'int8=256', 'topk=0.01', 'powersgd=4']
    >>> canonical("zip")
    Traceback (most recent call last):
    distbelief.errors.JobError: there is no compression 'zip'
    """
    name, number = _split(text)
    if name == "bf16":
        if number:
            raise JobError(f"bf16 has no number, and '{number}' follows it", hint=KNOWN)
        return name
    if name == "topk":
        fraction = _fraction(text, number)
        check_fraction(fraction)
        return f"topk={fraction!r}"
    count = _whole(text, number) if number else _USUAL[name]
    (check_block if name == "int8" else check_rank)(count)
    return name if (name, count) == ("int8", _USUAL["int8"]) else f"{name}={count}"


def long_form(text: str) -> str:
    """The same for `spec.parse`.

    >>> [long_form(text) for text in ("int8", "int8=256", "topk=0.01", "powersgd=2")]
    ['int8', 'int8:block=256', 'topk:0.01', 'powersgd:rank=2']
    """
    name, number = _split(canonical(text))
    key = {"int8": "block=", "powersgd": "rank="}.get(name, "")
    return f"{name}:{key}{number}" if number else name


def _split(text: str) -> tuple[str, str]:
    name, _, number = text.strip().replace(":", "=", 1).partition("=")
    if name not in NAMES:
        raise JobError(f"there is no compression '{name}'", hint=KNOWN)
    for key in ("block=", "rank=", "fraction="):
        number = number.removeprefix(key)
    return name, number


def _fraction(text: str, number: str) -> float:
    if not number:
        raise JobError(f"the compression '{text}' must say which fraction to send", hint="for example topk=0.01")
    try:
        return float(number)
    except ValueError:
        raise JobError(
            f"'{number}' in the compression '{text}' is not a fraction", hint="for example topk=0.01"
        ) from None


def _whole(text: str, number: str) -> int:
    if not (number.isascii() and number.isdigit()):
        raise JobError(f"'{number}' in the compression '{text}' is not a whole number", hint=KNOWN)
    return int(number)
