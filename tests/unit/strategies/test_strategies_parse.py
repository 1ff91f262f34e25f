"""The string form of every strategy, both ways, and what is said of those that make no sense."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.errors import JobError
from distbelief.strategies import parse
from distbelief.strategies.base import Strategy
from distbelief.strategies.dataparallel.strategy import AllReduce
from distbelief.strategies.localsgd.strategy import LocalSGD
from distbelief.strategies.mesh.rules.schedules import SCHEDULES
from distbelief.strategies.mesh.strategy import Hybrid, Pipeline, Sharded, Tensor
from distbelief.strategies.ps.strategy import ParameterServer
from distbelief.strategies.rules.degrees import Wish
from distbelief.strategies.sandblaster.strategy import Sandblaster

degree = st.integers(1, 64)
snapshots = st.none() | st.integers(0, 1000)
schedule = st.sampled_from(SCHEDULES)
transports = st.sampled_from(["auto", "shm", "gloo"])
hybrids = st.builds(
    Hybrid, data=degree | st.none(), tensor=degree, pipeline=st.integers(2, 64), sharded=degree, schedule=schedule,
    snapshots=snapshots,
) | st.builds(Hybrid, data=degree, tensor=degree, sharded=degree) | st.builds(
    Hybrid, data=st.integers(2, 64), pipeline=degree, snapshots=snapshots, always=st.booleans(),
    compression=st.sampled_from(["bf16", "int8", "int8=64", "topk=1e-3"]),
)  # fmt: skip


@given(
    st.builds(Pipeline, degree, schedule, snapshots)
    | st.builds(Tensor, degree, snapshots)
    | st.builds(Sharded, snapshots)
    | hybrids
    | st.builds(
        ParameterServer, st.integers(1, 64), backups=st.integers(0, 9), over=st.sampled_from(["auto", "shm", "tcp"])
    )
    | st.builds(
        ParameterServer,
        mode=st.just("async"),
        n_push=st.integers(1, 9),
        warm_up=st.integers(0, 9),
        noise=st.floats(0, 1),
        dc=st.floats(0, 9),
    )
    | st.builds(
        ParameterServer,
        mode=st.sampled_from(["async", "sync"]),
        compression=st.sampled_from(["bf16", "int8", "int8=64", "topk=1e-3"]),
        always=st.booleans(),
        over=st.sampled_from(["auto", "tcp"]),
    )
    | st.builds(ParameterServer, mode=st.just("ssp"), staleness=st.integers(0, 9), adaptive=st.booleans())
    | st.builds(
        Sandblaster,
        st.integers(1, 64),
        st.integers(1, 99),
        st.none() | st.integers(1, 999),
        st.floats(0.01, 9),
        st.sampled_from(["auto", "shm", "tcp"]),
    )
    | st.builds(AllReduce, st.booleans(), transports)
    | st.builds(LocalSGD, degree, degree | st.none(), transport=transports, copies=st.none() | st.booleans())
    | st.builds(LocalSGD, degree, compression=st.sampled_from(["bf16", "int8", "int8=64", "topk=1e-3"]))
    | st.builds(
        LocalSGD,
        degree,
        degree | st.none(),
        st.just("nesterov"),
        st.none() | st.floats(1e-6, 10),
        st.none() | st.floats(0.01, 0.99),
        transports,
    )
    | st.builds(
        AllReduce,
        exact=st.just(False),
        transport=st.sampled_from(["auto", "gloo"]),
        compression=st.sampled_from(
            ["bf16", "int8", "int8=64", "int8:block=1024", "topk=1e-3", "powersgd", "powersgd=2"]
        ),
        always=st.booleans(),
    )
)
def test_every_value_is_what_its_string_form_says(strategy: Strategy) -> None:
    assert parse(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "value", "wish"),
    [
        ("pipeline:4", Pipeline(4), Wish(None, 1, pipeline=4)),
        ("pipeline:4:zbv", Pipeline(4, "zbv"), Wish(None, 1, pipeline=4)),
        ("tensor:2", Tensor(2), Wish(None, 1, tensor=2)),
        ("sharded", Sharded(), Wish(1, None)),
        ("dp2.tp2.pp2", Hybrid(2, 2, 2), Wish(2, 1, 2, 2)),
        ("pp2.dp2", Hybrid(2, 1, 2), Wish(2, 1, 1, 2)),
        ("dp2.fsdp2", Hybrid(2, sharded=2), Wish(2, 2)),
        ("tp2.pp2:gpipe", Hybrid(None, 2, 2, schedule="gpipe"), Wish(None, 1, 2, 2)),
        ("fsdp2:snapshots=50", Hybrid(None, sharded=2, snapshots=50), Wish(None, 2)),
        ("pipeline:2:snapshots=0:interleaved", Pipeline(2, "interleaved", 0), Wish(None, 1, pipeline=2)),
    ],
)
def test_string_forms(text: str, value: Strategy, wish: Wish) -> None:
    assert parse(text) == value
    assert parse(text).wish == wish
    assert (value.exact, value.transport) == (False, "gloo")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("pipelines:2", "unknown strategy 'pipelines:2'", "pipeline:4"),
        ("hybrid", "unknown strategy 'hybrid'", "dp2.tp2.pp2"),
        ("", "unknown strategy ''", "known strategies"),
        ("pipeline", "'pipeline' needs a degree", "pipeline:2"),
        ("pipeline:zbv", "needs a degree", "pipeline:2"),
        ("tensor:-2", "needs a degree", "tensor:2"),
        ("pipeline:0", "is 0", "at least 1"),
        ("dp2.pp0", "is 0", "at least 1"),
        ("dp2.dp3", "dp is there twice", "once"),
        ("dp2.pipeline2", "'pipeline2' in the strategy 'dp2.pipeline2' is no degree", "pp (pipeline)"),
        ("dp2.pp", "'pp' in the strategy 'dp2.pp' needs a number", "pp2"),
        ("dp2..pp2", "'' in the strategy 'dp2..pp2' is no degree", "dp (data)"),
        ("sharded:2", "among all workers", "fsdp2"),
        ("sharded:zbv", "is for pipelines", ""),
        ("tp2:gpipe", "is for pipelines", ""),
        ("pipeline:2:zb", "unknown option 'zb'", "gpipe, 1f1b, interleaved, zbv, snapshots=STEPS"),
        ("tensor:2:fast", "unknown option 'fast'", "snapshots=STEPS"),
        ("pipeline:2:zbv:gpipe", "gives its schedule twice", "once"),
        ("sharded:snapshots", "not of the form snapshots=50", "0 takes none"),
        ("sharded:snapshots=-1", "not of the form snapshots=50", "0 takes none"),
        ("allreduce:fast", "unknown option 'fast'", "inexact"),
        ("ps:foo", "unknown option 'foo' in the strategy 'ps:foo'", "ps:sync:servers=2"),
        ("ps:sync:servers=0", "must be at least 1, not 0", "ps:sync:servers=2"),
        ("ps:sync:servers=", "unknown option 'servers='", "ps:sync:servers=2"),
        ("ps:sync:servers=-1", "unknown option 'servers=-1'", "ps:sync:servers=2"),
        ("pipeline:2:int8", "nothing to compress in pipeline:2:int8: only gradients between", "dp2.pp2:int8"),
        ("tensor:2:bf16", "nothing to compress in tensor:2:bf16", "activations"),
        ("sharded:int8:always", "nothing to compress in sharded:int8:always", "pieces of a sharded model"),
        ("dp1.pp2:int8", "nothing to compress in dp1.pp2:int8", "dp2 or more"),
        ("tp2.pp2:int8", "nothing to compress in tp2.pp2:int8", "dp2 or more"),
        ("dp2.pp2:powersgd=2", "powersgd cannot compress the gradients of a model that is divided", "bf16"),
        ("dp2.pp2:always", "always is for compression", "dp2.pp2:int8:always"),
        ("dp2.pp2:int8:bf16", "gives its compression twice", "once"),
        ("ps:sync:int8:backups=1", "no backup copies", "leave out backups or int8"),
        ("local_sgd:8:powersgd=4", "powersgd cannot compress the differences of local_sgd", "allreduce:powersgd=4"),
        ("local_sgd:8:int8:always", "never switched off", "leave always out"),
        ("local_sgd:8:int8:bf16", "gives its compression twice", "once"),
        ("ps:async:powersgd=4", "powersgd cannot compress what is pushed to servers", "allreduce:powersgd=4"),
        ("ps:async:int8:shm", "in shared memory there is nothing to compress", "tcp"),
        ("ps:async:always", "always is for compression", "ps:async:int8:always"),
        ("ps:async:bf16:int8", "gives its compression twice", "once"),
        ("ps:async:int8:dc=0.1", "delay compensation sends the parameters along", "leave out dc or int8"),
        ("ps:async:topk", "must say which fraction", "topk=0.01"),
        ("ps:async:backups=1", "backups are for sync", "does not wait for late workers"),
        ("ps:sync:backups=many", "unknown option 'backups=many'", "backups=1"),
        ("ps:sync:adaptive", "are for async and ssp", "leave them out"),
        ("ps:async:adaptive:n_push=2", "adaptive chooses n_push and n_fetch itself", "leave"),
        ("ps:sync:dc=0.1", "dc are for async and ssp", "leave them out"),
        ("ps:async:dc=-1", "dc of parameter servers must be 0 or more, not -1.0", ""),
        ("ps:async:dc=much", "unknown option 'dc=much'", "dc=0"),
        ("ps:sync:gloo", "unknown option 'gloo'", "tcp"),
        ("sandblaster:2", "unknown option '2'", "sandblaster:servers=2"),
        ("sandblaster:history=0", "history must be a whole number of at least 1, not 0", "history=10"),
        (
            "sandblaster:portion=a",
            "'portion=a' in the strategy 'sandblaster:portion=a' does not give a whole",
            "portion",
        ),
        ("sandblaster:lr=nan", "lr must be above 0, not nan", "the default is 1"),
        ("sandblaster:lr=1:lr=2", "gives its lr twice", "once"),
        ("local_sgd", "'local_sgd' does not say how many local steps there are", "local_sgd:8"),
        ("local_sgd:nesterov", "does not say how many local steps", "local_sgd:8"),
        ("local_sgd:0", "local_sgd: steps must be a whole number of at least 1, not 0", "local_sgd:8"),
        ("local_sgd:8:replicas=0", "replicas must be a whole number of at least 1, not 0", "replicas=4"),
        ("local_sgd:8:replicas=many", "'replicas=many' in the strategy", "replicas=4"),
        ("local_sgd:8:adam", "unknown option 'adam'", "nesterov"),
        ("local_sgd:8:lr=0.5", "an average has no learning rate", "nesterov"),
        ("local_sgd:8:nesterov:lr=-1", "the outer learning rate must be above 0, not -1.0", "lr=0.7"),
        ("local_sgd:8:nesterov:momentum=1", "between 0 and 1, not 1.0", "leave nesterov out"),
        ("local_sgd:8:nesterov:nesterov", "gives its outer twice", "once"),
        ("allreduce:int4", "unknown option 'int4'", "int8"),
        ("allreduce:topk", "must say which fraction", "topk=0.01"),
        ("allreduce:topk=many", "'many' in the compression 'topk=many' is not a fraction", "topk=0.01"),
        ("allreduce:topk=0.9", "cannot send the fraction 0.9", "0.5"),
        ("allreduce:powersgd=0", "cannot have the rank 0", "1024"),
        ("allreduce:powersgd=x", "'x' in the compression 'powersgd=x' is not a whole number", "powersgd=4"),
        ("allreduce:int8=3", "blocks of 3 elements", "1024"),
        ("allreduce:bf16=2", "bf16 has no number", "int8"),
        ("allreduce:int8:bf16", "gives its compression twice", "once"),
        ("allreduce:int8:shm", "in shared memory there is nothing to compress", "gloo"),
        ("allreduce:always", "always is for compression", "int8:always"),
    ],
)
def test_what_makes_no_sense_is_said_with_what_would(text: str, message: str, hint: str) -> None:
    with pytest.raises(JobError) as caught:
        parse(text)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_compression_implies_the_rest() -> None:
    value = parse("allreduce:int8")
    assert (
        value
        == AllReduce(compression="int8")
        == AllReduce(exact=False, transport="gloo", compression="int8:block=1024")
    )
    assert (value.exact, value.transport, str(value)) == (False, "gloo", "allreduce:int8")
    assert parse("allreduce:inexact:gloo:powersgd") == AllReduce(compression="powersgd=4")
    assert AllReduce().exact


def test_values_check_themselves() -> None:
    for make, message in [
        (lambda: Pipeline(0), "stages must be a whole number of at least 1, not 0"),
        (lambda: Tensor(True), "degree must be a whole number of at least 1, not True"),
        (lambda: Sharded(snapshots=-1), "snapshots must be a whole number of at least 0, not -1"),
        (lambda: Pipeline(2, "zb"), "unknown schedule 'zb'"),  # type: ignore[arg-type]
        (lambda: Hybrid(), "must divide something"),
        (lambda: ParameterServer(True), "must be at least 1, not True"),
        (lambda: ParameterServer(2, over="gloo"), "unknown transport 'gloo'"),  # type: ignore[arg-type]
        (lambda: Sandblaster(2, over="gloo"), "unknown transport 'gloo'"),  # type: ignore[arg-type]
        (lambda: Sandblaster(True), "servers must be a whole number of at least 1, not True"),
        (lambda: Hybrid(data=0, tensor=2), "data must be a whole number of at least 1, not 0"),
        (lambda: Hybrid(tensor=2, schedule="zbv"), "tp2:zbv has none"),
        (lambda: AllReduce(exact=True, compression="int8"), "it cannot be exact"),
        (lambda: AllReduce(compression="zip"), "there is no compression 'zip'"),
    ]:
        with pytest.raises(JobError, match=message):
            make()


@pytest.mark.parametrize("text", ["dp2.pp2", "allreduce:topk=0.01"])
def test_no_torch_is_needed_to_read_one(text: str) -> None:
    code = f"import sys; from distbelief.strategies import parse; parse('{text}').wish; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
