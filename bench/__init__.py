"""Every claim of speed, memory and recovery, measured side by side with peers: `python -m bench`.

Nothing is imported here: drivers of other systems import from this package in environments that have little else.
"""
