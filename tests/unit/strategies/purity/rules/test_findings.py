"""The sentences of the purity check, by plain calls."""

from __future__ import annotations

from distbelief.strategies.purity import Impurity
from distbelief.strategies.purity.rules.findings import (
    Hidden,
    Written,
    batch_differs,
    hidden,
    notice,
    refusal,
    unexplained,
    written,
)


def test_one_parameter_that_does_not_learn_becomes_a_buffer() -> None:
    assert written([Written("teacher.0.weight", False)]) == [
        Impurity(
            "`teacher.0.weight` is written in forward",
            "make it a buffer (`register_buffer`): buffers are restored before each shard, and committed with the step",
        )
    ]


def test_many_parameters_are_one_sentence() -> None:
    (found,) = written([Written(f"teacher.{i}.weight", False) for i in range(50)])
    assert found.what == (
        "`teacher.0.weight`, `teacher.1.weight`, `teacher.2.weight` and 47 more are written in forward"
    )
    assert found.way_out.startswith("make them buffers")


def test_each_kind_of_write_has_its_own_way_out() -> None:
    given = [
        Written("teacher.weight", False),
        Written("critic.weight", True),
        Written("embedding.weight", True, 1.5),
        Written("scale", False, is_new=True),
    ]
    new, limited, learnt, kept = written(given)
    assert "`scale` is made in forward" in new.what
    assert "`embedding.weight` is written in forward: its layer has max_norm=1.5" in limited.what
    assert "`Job.after_update`" in limited.way_out
    assert learnt.what == "`critic.weight` is written in forward"
    assert "`Job.after_update`" in learnt.way_out
    assert kept.what == "`teacher.weight` is written in forward"
    assert "after_update" not in kept.way_out


def test_hidden_state_is_a_buffer_or_a_global_generator_or_no_state() -> None:
    given = [
        Hidden("noise.draws", "a Python attribute of Noise", "generator"),
        Hidden("encoder.calls", "a Python attribute of Encoder", "value"),
        Hidden("rnn.state", "a Python attribute of Rnn", "tensor"),
        Hidden("loss.mean", "an attribute of Loss", "value", in_loss=True),
    ]
    generator, counter, carried, loss = hidden(given)
    assert generator.what == "`noise.draws` (a Python attribute of Noise) draws other numbers each time"
    assert "seeded for each shard" in generator.way_out
    assert counter.what.startswith("`encoder.calls` (a Python attribute of Encoder) changes while a shard is computed")
    assert counter.what.endswith(", and the result depends on it")
    assert "`register_buffer`" in counter.way_out
    assert "must begin anew in each batch" in carried.way_out
    assert loss.what.endswith("changes in the loss, and the result depends on it")
    assert "a function of output and target" in loss.way_out


def test_the_mode_of_a_module_is_no_counter() -> None:
    (found,) = hidden([Hidden("norm.training", "a Python attribute of BatchNorm1d", "value")])
    assert "override `train` of that module" in found.way_out
    assert "counter" not in found.way_out


def test_a_parameter_that_disappears_is_tied_too_late() -> None:
    (found,) = written([Written("head.weight", False, is_removed=True)])
    assert found.what == "`head.weight` is removed or replaced by another parameter in forward"
    assert found.way_out == "tie weights in the module's __init__"


def test_what_is_not_explained_names_what_differed() -> None:
    assert unexplained(["a", "b"], ["mean"], []).what == (
        "the same shard, computed again, gave another gradient of `a` and 1 more"
    )
    assert (
        unexplained([], ["mean"], []).what == "the same shard, computed again, gave another value of the buffer `mean`"
    )
    assert unexplained([], [], []).what == "the same shard, computed again, gave another loss"
    assert unexplained(["a"], [], ["calls"]).what == (
        "the same shard, computed again, gave another gradient of `a` (`calls` changed meanwhile; with it put back it "
        "did too)"
    )


def test_a_batch_is_the_collates_only_if_there_is_one() -> None:
    assert batch_differs("Noise", "samples 0, 1", True).what == "`collate` made two different batches of samples 0, 1"
    assert batch_differs("Noise", "samples 0, 1", False).what == "`Noise` gave two different batches of samples 0, 1"


def test_one_reason_is_a_message_with_its_way_out() -> None:
    message, hint, details = refusal([Impurity("`a` is written", "make it a buffer")])
    assert message == "the result would depend on the cluster: `a` is written"
    assert hint == "make it a buffer; docs/purity.md says what a job's code may do; --impure trains nevertheless"
    assert details == ""


def test_several_reasons_are_a_list() -> None:
    found = [Impurity("`a` is written", "make it a buffer"), Impurity("`b` draws", "draw without")]
    message, hint, details = refusal(found)
    assert message == "the result would depend on the cluster: `a` is written (and 1 more)"
    assert "--impure" in hint
    assert details.splitlines() == ["`a` is written: make it a buffer", "`b` draws: draw without"]
    assert notice(found) == "the result depends on the cluster (--impure): `a` is written; `b` draws"
