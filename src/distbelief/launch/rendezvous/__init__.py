"""How the processes of a launch on several hosts find the one that leads: one file per way.

The secret of a run is in no variable and on no command line, where others could read it.
"""
