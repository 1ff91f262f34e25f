"""Model parallelism: the members of a generation form a mesh of pipeline × data × sharded × tensor; each holds a part.

`strategy.py` has the strategies' values (`pipeline:4`, `tensor:2`, `sharded`, `dp2.tp2.pp2`), without torch. Files in
`rules/` decide and are pure. Everything else runs on workers only.

**How a part of the model comes to a member.** Once per worker, `run/prepared.py` makes the model on the meta device and
records how its initial values come about (`init/`): no worker ever has the whole model in memory. For each generation
`build` then makes this member's part (`run/modelpart.py`), in this order:

1. tensor: trace what the model computes (`tensor/trace.py`), search for layers that can be divided together
   (`tensor/search.py`, `rules/propagation.py`), divide them (`tensor/apply.py`);
2. pipeline: record a forward pass (`cut/tracing.py`), find where it may be cut
   (`cut/recordedpass.py`, `cut/cutting.py`), measure the units, choose the cuts
   (`rules/balance.py`), write the code of this member's stages (`cut/stages.py`);
3. sharded: wrap the blocks of each stage with FSDP2 (`run/modelpart.py`);
4. give memory to what this member holds, and values (`state/restore.py`).

**How a step runs** (`run/replica.py`). A member runs its stages on the shards of its data group, in the order of the
pipeline schedule (`run/runner.py`, `rules/schedules.py`). Activations go to the next stage and gradients back
(`run/stagetransfer.py`). Then gradients are added over stages that share a parameter and over data groups
(`run/gradientsum.py`; FSDP2 has added its own). All members vote, with one all-reduce of losses, weights and norms. A
member that gets the result applies the step to its own part without any other member (`state/memberstate.py`). A member
that is interrupted inside the vote keeps the gradients, and applies the step in the next generation if any member has.

**How state moves.** Every member knows for each tensor of the state which box of the whole each member holds
(`state/member.py`, `checkpoint/rules/boxes.py`). Whether a state is complete and which member sends which box are
questions about boxes (`rules/boxes.py`). When a generation begins, the members report the states that they have and
choose the newest complete one (`rules/agreement.py`): that of the survivors, or snapshots that each member keeps of
itself and of a neighbour (`state/snapshots.py`), or a checkpoint, or the initial values. `state/restore.py` transfers
it. `state/saving.py` writes checkpoints, box by box, and at the end the whole weights, tensor by tensor.
"""
