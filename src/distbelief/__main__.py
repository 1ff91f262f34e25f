"""`python -m distbelief` is `distbelief`: what torchrun and srun can start without a path."""

from distbelief.cli.main import main

main()
