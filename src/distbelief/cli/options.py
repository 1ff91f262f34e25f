"""Command-line options that several commands have. Options of a run are made from their declarations in options.py."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from distbelief.options import DEFAULT_STRATEGY, declared_options

JobFile = Annotated[Path, typer.Argument(help="The job file: Python that defines `job`.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set a hyper-parameter of the job. May be repeated."),
]
Listen = Annotated[
    str,
    typer.Option(
        metavar="HOST[:PORT]",
        help="Where other hosts can join: an address or name of this machine, a network card, 0.0.0.0.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines even on a terminal.")]

_DEFAULTS = {"strategy": DEFAULT_STRATEGY}


def with_run_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command a command-line option for each of these options of a run, in the place of its parameter
    `options`. The command gets their values in `options`, by name."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            if parameter.name == "options":
                parameters += [_parameter(name) for name in names]
            else:
                parameters.append(parameter)

        @functools.wraps(command)
        def parsed(**values: Any) -> None:
            command(**{name: values.pop(name) for name in list(values) if name not in names}, options=values)

        by_keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        parsed.__signature__ = signature.replace(parameters=by_keyword)  # type: ignore[attr-defined]
        parsed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return parsed

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    declared = declared_options()[name]
    kind: Any = declared.type
    option = declared.option
    default = _DEFAULTS.get(name, declared.default)
    assert default is not msgspec.NODEFAULT, f"{name} has no default"
    flags = (option.flag,) if option.flag else ()
    shown = typer.Option(*flags, help=option.help, metavar=option.metavar, min=option.least)
    annotation: Any = Annotated[kind, shown]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
