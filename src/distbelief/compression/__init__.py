"""Fewer bytes on the wire, as an option of a transport. Tensors and policy only: no sockets, clocks or groups here.

`codec` says what a codec is, `spec` reads one from text; `bf16`, `int8` and `topk` are codecs of flat vectors.
`feedback` keeps what they lose for the next time. `powersgd` is for groups that sum matrices. `switch` decides
whether it pays.
"""
