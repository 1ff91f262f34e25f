"""Which engine runs a launch: this process by itself, or a cluster."""

from __future__ import annotations

from typing import Any

from distbelief.engines.launch import Launch, Observer
from distbelief.engines.lead import Announce, lead
from distbelief.errors import DistBeliefError


def run(launch: Launch, observer: Observer, announce: Announce | None = None) -> dict[str, Any]:
    """Run to the end, as `lead` does."""
    if launch.on == "local":
        return lead(launch, observer, announce)
    from distbelief.engines.ray import driver  # it takes a moment, and few need it

    return driver.run(launch, observer)


def check(on: str) -> None:
    """Raises, before anything is made, if there is no such place."""
    if on == "ray" or on.startswith("ray:"):
        from distbelief.engines.ray.cluster import address_of

        address_of(on)
    elif on != "local":
        raise DistBeliefError(f"unknown engine: --on {on}", hint="use local, ray, ray://HOST:PORT or ray:HOST:PORT")
