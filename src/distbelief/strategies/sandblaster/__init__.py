"""sandblaster: L-BFGS over all samples, with the vectors on parameter servers (Downpour's batch counterpart in the
DistBelief paper).

**Driver.** A step is one iteration of L-BFGS. The first member of a generation is its *driver*: it runs the rules
(rules/lbfgs.py), which command vectors by name and see only scalars. `ServedVectors` (vectors.py) sends the commands in
numbered batches to all slices and adds up the scalars that come back.

**Vectors on servers.** A `VectorSlice` (slices.py) holds its stretch of every vector and performs the batches in the
order of their numbers. One slice more, the `SearchSlice`, holds what must be decided once: the state of the search
between two iterations, and which member computes which portions. All slices are replicated as every slice of a
parameter server is: primary and backup apply the same changes (strategies/ps).

**Portions.** For an evaluation the driver tells the search slice, then the vector slices: show this point, gather sums
of gradients. Every member, the driver too, takes portions of the samples (rules/portions.py) from the search slice,
fetches the shown point, adds up the gradients of its portions along a fixed tree (evaluation.py), pushes the sum to the
slices, and reports it with its next request. When no portion is missing, the driver commands the slices to finish the
gradient.

**A driver's death.** The search slice keeps the state at the end of each iteration (`Keep`); only then is the step
done. The driver of the next generation begins with a higher number, which invalidates all that the earlier driver may
still say. It repeats the iteration from the kept state: an iteration writes only to vectors that the state does not
name, so the repetition gives the same bits. Gradient sums of the interrupted evaluation that are on the slices stay.

**Exactness.** Gradients are added along the tree of portions, inner products along a tree of blocks of 64 elements in
float64, and combinations are elementwise. So the weights do not depend on the number of workers, servers or slices.

Files: strategy.py (the value), prepared.py (the model), member.py and evaluation.py (a worker, which may drive),
vectors.py, slices.py (server side), saved.py (checkpoints), messages.py, rules/.
"""
