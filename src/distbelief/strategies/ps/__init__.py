"""Parameter servers (`ps:sync`, `ps:ssp`, `ps:async`): servers own the parameters and apply updates; workers compute
gradients, push them, and pull parameters. `sandblaster` and the key-value store use the same protocol and servers.

Slices. The parameters are cut into 4 to 16 slices (rules/slicing.py). A slice is the unit that a server owns, copies
and answers for: neighbouring tiles of the layout with the state of their optimizer. The sparse tables are cut into
parts (tables/), and a part is a slice like any other. In the asynchronous modes one more slice has the leases.

Primary and backup. A map, made by the coordinator, names two servers for each slice. The primary applies a change, and
forwards it to the backup as it came. Both apply the same changes in the same order, so both have the same bits, and no
state travels (rules/replication.py). Every change has a name, (client, sequence) or the number of an update, and a
slice applies each named change once, however often the change is sent (rules/applied.py).

The way of a push. worker/synchronous.py or worker/asynchronous.py makes a message (protocol/messages.py). The client
(protocol/client.py) sends it as frames (protocol/frames.py) to the primary, and repeats it until it is acknowledged.
The server's poll loop (server/sockets.py) checks the signature and passes the message to `ServerNode` (server/node.py),
which asks `ReplicatedSlice` what to do: apply the change to the slice's store, forward it, and acknowledge it when the
backup has it. The stores (their interface: server/stores.py) are server/syncslice.py, server/asyncslice.py and
tables/slices.py. On one host the bytes stay in shared memory, and the message names the segment
(server/slicememory.py).

sync. Workers push partial sums, named by their shards. A slice that has all sums of a step answers `MeasureStep`; when
all slices have answered, a worker sends `ApplyStep`. So a slice that has applied a step proves that every slice has all
sums of it, and the members of a new generation know which shards to compute again (rules/gathering.py). The sums are
added in the order of the tree: the bits are those of allreduce. With `backups=B` members compute the missing shards of
late members (worker/backupworkers.py).

ssp and async. A worker leases an update, which is one or more batches, from the slice of leases (rules/leases.py),
computes it with its own copy of the parameters, pushes it to all slices, and completes it. `ssp` bounds the staleness
of every update by not leasing what could exceed it. The training loop is worker/asynctraining.py, the choice of how
often to push and pull rules/pace.py. Compressed pushes, with error feedback, are in worker/compressed.py for all modes.

A server's death. The coordinator makes a new map: backups of the dead server's slices become primaries, and a new
backup gets a copy while training goes on. Clients send again to the new primary what is not acknowledged. No update is
lost or applied twice. If primary and backup of a slice die before there is a copy, a new life begins: all slices begin
anew from the newest checkpoint, and messages of the earlier life are dropped.

A worker's death. In `sync` its pushed sums count, and the other members compute the missing shards. In the asynchronous
modes its update is leased to another worker, and only the slices that do not have it yet apply it.

Sparse tables. A model uses `EmbeddingTable`. strategies/tables has this class, the gradients of rows and the first
values of rows, because a table works under every strategy. tables/specs.py lists the tables of a run with the
optimizers of their rows (tables/rowoptimizers.py), and tables/rowbuckets.py says in which part a row lies. A worker
pulls and pushes rows through `RemoteTables` (tables/remote.py), as the bytes of tables/payloads.py and the messages of
tables/messages.py. On a server tables/slices.py is a part of the tables, and tables/store.py holds its rows.
tables/saved.py reads and writes checkpoints.

strategy.py has the value and the parser, rules/options.py the options, worker/prepared.py the model on a worker or
server, and server/runslices.py the server process with the slices of a run.
"""
