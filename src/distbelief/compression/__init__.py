"""Gradient compression: fewer bytes on the wire, as an option of a strategy.

`option.py` is the grammar of options, without torch; `methods.py` constructs the codec for an option. `codec.py` is the
interface of codecs: bf16, int8 and top-k, of flat vectors. PowerSGD sums matrices over a group instead. An encoded
vector travels as one block of bytes (`block.py`); encoding errors are kept as residuals (`residuals.py`).
`switch.py` decides from measurements whether compression pays. `exchanges/` are the exchanges that use all this.
"""
