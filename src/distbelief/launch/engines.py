"""Which engine runs a launch: this process leads the run, or on Ray an actor leads it.

The imports inside the functions are heavy; the command line asks this module which engines there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from distbelief.errors import DistBeliefError

if TYPE_CHECKING:
    from distbelief.control.credentials import KeyAuthority
    from distbelief.launch.launch import Launch, Observer
    from distbelief.launch.lead import Announce


class Engine(Protocol):
    """Brings the agents of other hosts. The process that leads the run calls it."""

    def arrange(self, launch: Launch) -> Launch:
        """Complete the launch with the engine's values: the number of workers on this host, the address to listen
        at."""

    def announce(self, address: str, authority: KeyAuthority) -> None:
        """Called when the coordinator listens at this address: agents can take part."""


LOCAL = "local"


def run(launch: Launch, observer: Observer, announce: Announce | None = None) -> dict[str, Any]:
    """Run until the end. See `lead`."""
    if is_ray(launch.placement.on):
        from distbelief.launch.ray import driver

        return driver.run(launch, observer)
    from distbelief.launch.lead import lead

    return lead(launch, observer, announce)


def is_ray(on: str) -> bool:
    return on == "ray" or on.startswith("ray:")


def check(on: str) -> None:
    """Raise if a program cannot start runs on this engine by itself. Nothing is created before."""
    if is_ray(on):
        from distbelief.launch.ray.cluster import address_of

        address_of(on)
    elif on != LOCAL:
        raise DistBeliefError(
            f"--on {on}: a program starts a run on this machine or on Ray",
            hint="use local, ray, ray://HOST:PORT or ray:HOST:PORT; launchers are for `distbelief train --on`",
        )
