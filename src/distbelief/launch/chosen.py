"""Which engine runs a launch: this process leads it, whoever brings the hosts; on Ray an actor does.

What is heavy is imported when it is needed: the command line asks here what there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distbelief.errors import DistBeliefError

if TYPE_CHECKING:
    from distbelief.launch.launch import Launch, Observer
    from distbelief.launch.lead import Announce

LOCAL = "local"


def run(launch: Launch, observer: Observer, announce: Announce | None = None) -> dict[str, Any]:
    """Run to the end, as `lead` does."""
    if is_ray(launch.placement.on):
        from distbelief.launch.ray import driver

        return driver.run(launch, observer)
    from distbelief.launch.lead import lead

    return lead(launch, observer, announce)


def is_ray(on: str) -> bool:
    return on == "ray" or on.startswith("ray:")


def check(on: str) -> None:
    """Raises, before anything is made, if that is nothing that a process starts runs on by itself."""
    if is_ray(on):
        from distbelief.launch.ray.cluster import address_of

        address_of(on)
    elif on != LOCAL:
        raise DistBeliefError(
            f"--on {on}: a program starts a run on this machine or on Ray",
            hint="use local, ray, ray://HOST:PORT or ray:HOST:PORT; launchers are for `distbelief train --on`",
        )
