"""The place of a process, from the variables of its launcher: as the launchers set them, and when they say nonsense."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distbelief.errors import DistBeliefError
from distbelief.launch.launchers.rules.place import Place
from distbelief.launch.launchers.rules.variables import BY_LAUNCHER, hosts_in, tasks_per_node

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "259981313",
    "OMPI_MCA_orte_hnp_uri": "259981312.0;tcp://10.0.0.1:34687",
}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_NODEID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "7",
    "SLURM_JOB_NODELIST": "node[01-03],big7",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
CLUSTER = {"chief": ["a:2222"], "worker": ["a:2223", "b:2222"], "ps": ["b:2223", "c:2222"], "evaluator": ["d:1"]}


def tf_config(kind: str, index: object = 0, cluster: object = CLUSTER) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def found(launcher: str, environment: Mapping[str, str]) -> Place:
    place = BY_LAUNCHER[launcher](environment)
    assert place is not None
    return place


def numbers(place: Place) -> tuple[int, int, int, int]:
    return place.index, place.count, place.local_index, place.local_count


@pytest.mark.parametrize(
    ("launcher", "environment", "expected"),
    [
        ("mpi", OPEN_MPI, (5, 8, 1, 4)),
        ("mpi", HYDRA, (0, 2, 0, 2)),
        ("slurm", SLURM, (6, 7, 0, 1)),
        ("mpi", SLURM | {"PMI_RANK": "6", "PMI_SIZE": "7"}, (6, 7, 0, 1)),  # srun --mpi=pmi2
        ("mpi", SLURM, (6, 7, 0, 1)),  # srun --mpi=pmix
        ("torchrun", TORCHRUN, (3, 4, 1, 2)),
        ("tf_config", tf_config("worker", 1), (2, 5, 0, 2)),
    ],
)
def test_the_variables_of_a_launcher(
    launcher: str, environment: Mapping[str, str], expected: tuple[int, int, int, int]
) -> None:
    place = found(launcher, environment)
    assert numbers(place) == expected
    assert place.launcher == launcher
    assert place.leads == (place.index == 0)


def test_open_mpi_inside_a_slurm_job_is_open_mpi() -> None:
    assert numbers(found("mpi", SLURM | OPEN_MPI)) == (5, 8, 1, 4)


def test_all_processes_of_a_launch_agree_about_its_name_and_no_other_launch_does() -> None:
    rank = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert found("mpi", OPEN_MPI | rank).job == found("mpi", OPEN_MPI).job
    assert found("mpi", OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "elsewhere"}).job != found("mpi", OPEN_MPI).job
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"):
        assert found("slurm", SLURM | {name: "99"}).job != found("slurm", SLURM).job
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        assert found("torchrun", TORCHRUN | {name: "99"}).job != found("torchrun", TORCHRUN).job


def test_slurm_names_the_hosts() -> None:
    place = found("slurm", SLURM)
    assert place.host == "big7"
    assert place.peers == ("node01", "node02", "node03", "big7")


def test_the_step_of_slurm_counts_and_not_its_job() -> None:
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "node02",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": "1",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "1",
    }
    place = found("slurm", SLURM | step)
    assert numbers(place) == (1, 2, 1, 2)
    assert place.is_alone
    assert place.host == "node02"


def test_torchrun_tells_where_to_meet() -> None:
    assert found("torchrun", TORCHRUN).address == "node1:29400"
    assert found("torchrun", TORCHRUN | {"MASTER_ADDR": "fd00::2"}).address == "[fd00::2]:29400"


def test_a_process_of_an_operator_has_a_host_to_itself() -> None:
    environment = {name: value for name, value in TORCHRUN.items() if not name.startswith(("LOCAL", "TORCHELASTIC"))}
    assert numbers(found("torchrun", environment)) == (3, 4, 0, 1)


@pytest.mark.parametrize(
    ("kind", "index", "expected", "workers_here", "servers_here"),
    [
        ("chief", 0, (0, 5, 0, 2), 2, 0),
        ("master", 0, (0, 5, 0, 2), 2, 0),
        ("worker", 0, (1, 5, 1, 2), 2, 0),
        ("worker", 1, (2, 5, 0, 2), 1, 1),
        ("ps", 0, (3, 5, 1, 2), 1, 1),
        ("ps", 1, (4, 5, 0, 1), 0, 1),
    ],
)
def test_each_task_of_tf_config_has_its_role(
    kind: str, index: int, expected: tuple[int, int, int, int], workers_here: int, servers_here: int
) -> None:
    place = found("tf_config", tf_config(kind, index))
    assert numbers(place) == expected
    assert (place.workers, place.workers_here, place.servers_here) == (3, workers_here, servers_here)
    assert place.address == "a:2222"
    assert place.peers == ("a", "b", "c")


def test_servers_are_where_the_ps_tasks_are() -> None:
    chief, worker, alone = (found("tf_config", tf_config(*task)) for task in (("chief", 0), ("worker", 1), ("ps", 1)))
    assert [place.first_servers(2) for place in (chief, worker, alone)] == [0, 1, 1]
    assert [place.first_servers(3) for place in (chief, worker, alone)] == [0, 2, 2], "there is room for one too many"
    assert found("mpi", OPEN_MPI).first_servers(3) == -1


def test_without_a_chief_the_first_worker_leads() -> None:
    assert found("tf_config", tf_config("worker", 0, {"worker": ["a:1", "b:1"]})).leads


def test_a_cluster_with_gaps_in_its_numbers() -> None:
    cluster = {"worker": {"0": "a:1", "7": "b:1"}}
    assert numbers(found("tf_config", tf_config("worker", 7, cluster))) == (1, 2, 0, 1)


def test_an_evaluator_has_nothing_to_do() -> None:
    assert BY_LAUNCHER["tf_config"](tf_config("evaluator")) is None


def without(environment: Mapping[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key != name}


@pytest.mark.parametrize(
    ("launcher", "environment", "says"),
    [
        ("mpi", {}, "no mpirun"),
        ("mpi", without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), "OMPI_COMM_WORLD_LOCAL_SIZE is not set"),
        ("mpi", OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE='many' is no number"),
        ("mpi", OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "-1"}, "is no number"),
        ("mpi", OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "9" * 5000}, "is no number"),
        ("mpi", OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "8"}, "process 8 of 8"),
        ("mpi", OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "process 4 of 4 on its host"),
        ("mpi", OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}, "but 1 of 4 on its host"),
        ("mpi", OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "9"}, "but 1 of 9 on its host"),
        ("mpi", OPEN_MPI | HYDRA, "disagree"),
        ("mpi", without(HYDRA, "MPI_LOCALRANKID"), "MPI_LOCALRANKID is not set"),
        ("slurm", {}, "no Slurm job"),
        ("slurm", without(SLURM, "SLURM_STEP_ID"), "srun has not started any"),
        ("slurm", without(SLURM, "SLURM_PROCID"), "SLURM_PROCID is not set"),
        ("slurm", without(SLURM, "SLURM_NTASKS"), "neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS"),
        ("slurm", SLURM | {"SLURM_NTASKS": "9"}, "contradict each other"),
        ("slurm", SLURM | {"SLURM_NODEID": "4"}, "contradict each other"),
        ("slurm", SLURM | {"SLURM_TASKS_PER_NODE": "2(x2),3"}, "contradict each other"),
        ("slurm", SLURM | {"SLURM_TASKS_PER_NODE": "2(y3)"}, "cannot be read"),
        ("slurm", SLURM | {"SLURM_TASKS_PER_NODE": "1(x99999999)"}, "cannot be read"),
        ("slurm", SLURM | {"SLURM_JOB_NODELIST": "node[1-"}, "cannot be read"),
        ("torchrun", {}, "RANK is not set"),
        ("torchrun", without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not set"),
        ("torchrun", TORCHRUN | {"MASTER_ADDR": ""}, "are no address of the first process"),
        ("torchrun", TORCHRUN | {"MASTER_PORT": "99999"}, "are no address of the first process"),
        ("tf_config", {}, "TF_CONFIG is not set"),
        ("tf_config", {"TF_CONFIG": "{"}, "no JSON"),
        ("tf_config", {"TF_CONFIG": "[]"}, "no cluster"),
        ("tf_config", {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "which task this is"),
        ("tf_config", tf_config("worker", 2), "there is none in its cluster"),
        ("tf_config", tf_config("worker", "first"), "which task this is"),
        ("tf_config", tf_config("worker", 0, {"worker": ["a"]}), "no list of addresses"),
        ("tf_config", tf_config("worker", 0, {"worker": "a:1"}), "no list of addresses"),
        ("tf_config", tf_config("worker", 0, {"worker": {"x": "a:1"}}), "not numbered"),
        ("tf_config", tf_config("worker", 0, {"worker": ["a:1", "a:1"]}), "two tasks have the address a:1"),
        ("tf_config", tf_config("worker", 0, {"worker": ["a:1"], "gpu": ["b:1"]}), "'gpu'"),
        ("tf_config", tf_config("ps", 0, {"ps": ["a:1"]}), "no chief and no worker"),
        ("tf_config", tf_config("chief", 0, {"chief": ["a:1", "b:1"]}), "more than one chief"),
    ],
)
def test_nonsense_is_one_clear_error(launcher: str, environment: Mapping[str, str], says: str) -> None:
    with pytest.raises(DistBeliefError) as caught:
        BY_LAUNCHER[launcher](environment)
    assert says in caught.value.message
    assert caught.value.hint


@settings(deadline=None)
@given(st.sampled_from(sorted(BY_LAUNCHER)), st.data())
def test_no_value_of_a_variable_is_a_traceback(launcher: str, data: Any) -> None:
    base = {"mpi": OPEN_MPI, "slurm": SLURM, "torchrun": TORCHRUN, "tf_config": tf_config("worker")}[launcher]
    name = data.draw(st.sampled_from(sorted(base)))
    some_json = st.recursive(st.none() | st.integers() | st.text(max_size=3), _deeper).map(json.dumps)
    value = data.draw(st.text(max_size=20) | st.integers(-9, 99).map(str) | some_json | _changed(base[name]))
    try:
        place = BY_LAUNCHER[launcher]({**base, name: value})
    except DistBeliefError:
        return
    assert place is None or 0 <= place.index < place.count


def _deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["cluster", "task", "worker", "chief", "ps", "type", "index", "0"])
    return st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)


def _changed(text: str) -> st.SearchStrategy[str]:
    at = st.integers(0, len(text))
    return st.builds(lambda where, put, cut: text[:where] + put + text[where + cut :], at, st.text(max_size=3), at)


def test_more_workers_than_processes() -> None:
    place = found("slurm", SLURM | {"SLURM_PROCID": "4", "SLURM_NODEID": "2"})
    assert (place.workers, place.workers_here) == (7, 2)
    more = place.with_workers(21)
    assert (more.workers, more.workers_here) == (21, 6)
    assert place.with_workers(None) == place
    with pytest.raises(DistBeliefError, match="8 workers cannot be spread evenly over 7 processes"):
        place.with_workers(8)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "node-", "x1y"]), st.integers(0, 300), st.integers(0, 4)), min_size=1))
def test_a_list_of_nodes_written_short_is_the_list(groups: list[tuple[str, int, int]]) -> None:
    text = ",".join(f"{name}[{first:03}-{first + more:03}]" for name, first, more in groups)
    assert hosts_in(text) == [f"{name}{n:03}" for name, first, more in groups for n in range(first, first + more + 1)]


@pytest.mark.parametrize(
    "text", ["", "a[1-3", "a]", "a[]", "a[3-1]", "a[x]", "a,,b", "a b", "a[0-999999999]", "a[[1]]"]
)
def test_a_list_of_nodes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(DistBeliefError, match="cannot be read"):
        hosts_in(text)


def test_a_list_of_nodes_never_fills_the_memory() -> None:
    with pytest.raises(DistBeliefError, match="cannot be read"):
        hosts_in("[0-9999]" * 5)


def test_tasks_per_node() -> None:
    assert tasks_per_node("1(x2),4") == [1, 1, 4]
