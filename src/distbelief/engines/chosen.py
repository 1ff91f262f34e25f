"""Which engine runs a launch: this process leads it, whoever brings the hosts; on Ray an actor does."""

from __future__ import annotations

from typing import Any

from distbelief.engines.launch import Launch, Observer
from distbelief.engines.lead import Announce, lead


def run(launch: Launch, observer: Observer, announce: Announce | None = None) -> dict[str, Any]:
    """Run to the end, as `lead` does."""
    if not is_ray(launch.on):
        return lead(launch, observer, announce)
    from distbelief.engines.ray import driver  # it takes a moment, and few need it

    return driver.run(launch, observer)


def is_ray(on: str) -> bool:
    return on == "ray" or on.startswith("ray:")


def check(on: str) -> None:
    """Raises, before anything is made, if that is no address of a Ray cluster."""
    if is_ray(on):
        from distbelief.engines.ray.cluster import address_of

        address_of(on)
