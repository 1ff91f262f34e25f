from __future__ import annotations

from msgspec.structs import replace

from distbelief.control.messages import Canary, JobFacts
from distbelief.coordinator.rules import explain

JOB = JobFacts(name="digits", shards=4, steps=10, global_batch=32, samples=1000, parameters=100, strategy="allreduce")
CANARY = Canary(fingerprint="c3d4", facts={"threads": "1", "torch": "2.13.0"})


def refusal(job: JobFacts = JOB, canary: Canary = CANARY, exact: bool = True) -> str:
    return explain.refusal(2, job, canary, JOB, CANARY, exact)


def test_a_worker_like_the_others_is_welcome() -> None:
    assert refusal() == ""


def test_other_threads() -> None:
    canary = Canary(fingerprint="ffff", facts={"threads": "2", "torch": "2.13.0"})
    assert refusal(canary=canary) == (
        "worker 2 computes with 2 threads, the run with 1: its results would differ in the last bits; "
        "start it with --threads 1, or use exact=False"
    )
    assert refusal(canary=canary, exact=False) == ""


def test_several_facts_and_one_nobody_knows() -> None:
    facts = {"threads": "1", "torch": "2.12.0", "flux_capacitor": "on"}
    text = refusal(canary=Canary(fingerprint="c3d4", facts=facts))
    assert "has flux capacitor on, the run unknown" in text
    assert "it has torch 2.12.0, the run torch 2.13.0" in text
    assert "install torch 2.13.0 there" in text


def test_only_the_fingerprint_differs() -> None:
    text = refusal(canary=replace(CANARY, fingerprint="a1b2"))
    assert text.startswith("worker 2 computed other bits for the same shard (fingerprint a1b2, the run's is c3d4)")


def test_other_data_are_told_from_another_machine() -> None:
    run = replace(CANARY, facts={**CANARY.facts, "data": "0a0a"})
    other = replace(run, fingerprint="ffff", facts={**CANARY.facts, "data": "1b1b"})
    for canary in (other, replace(other, fingerprint="c3d4")):
        text = explain.refusal(2, JOB, canary, JOB, run, exact=True)
        assert text.startswith("worker 2 has other data than the run (checksum 1b1b, the run's is 0a0a)")
        assert "random numbers without a seed" in text
        assert explain.refusal(2, JOB, canary, JOB, run, exact=False) == ""
        assert "threads" in explain.refusal(2, JOB, replace(canary, facts={"threads": "2"}), JOB, run, exact=True)
    assert explain.refusal(2, JOB, run, JOB, CANARY, exact=True) == "", "a run of an earlier version"
    assert "other bits" in explain.refusal(2, JOB, other, JOB, CANARY, exact=True)


def test_another_job_is_refused_even_when_not_exact() -> None:
    text = refusal(job=replace(JOB, samples=900, steps=9), exact=False)
    assert "would train 9 steps, the run 10" in text
    assert "sees 900 samples of data, the run 1000" in text
    assert "--set" in text


def test_every_fact_of_the_job_is_compared() -> None:
    for name in JobFacts.__struct_fields__:
        other = "other" if isinstance(getattr(JOB, name), str) else 77
        assert "does not train the same job" in refusal(job=replace(JOB, **{name: other})), name


def test_endings() -> None:
    assert explain.ending(3) == "exited with status 3"
    assert explain.ending(-9) == "was killed by SIGKILL (out of memory?)"
    assert explain.ending(-15) == "was killed by SIGTERM"
    assert explain.ending(-200) == "was killed by signal 200"


def test_spares() -> None:
    assert explain.spares(5, "4 shards", [4]) == "5 workers for 4 shards: worker 4 is a spare"
    assert explain.spares(3, "1 shard", [1, 2]) == "3 workers for 1 shard: workers 1, 2 are spares"
