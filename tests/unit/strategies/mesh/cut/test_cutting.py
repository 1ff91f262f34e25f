"""The cut: stages one after the other are the whole model to the bit, whatever the model does; and clear refusals."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from distbelief.errors import JobError
from distbelief.strategies.mesh.cut.cutting import Blueprint, make_blueprint, measure
from distbelief.strategies.mesh.cut.stages import Stage
from distbelief.strategies.mesh.run.runner import ShardBuffers
from tests.support.mesh import models
from tests.support.mesh.models import assert_same_bits, blueprint_of, give_values, on_meta, without_memory


def names(cut: Blueprint) -> list[str]:
    return [unit.name for unit in cut.units]


def tokens(batch: int, length: int = 8) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randint(0, 20, (batch, length)),), {}


def rows(batch: int, width: int = 8) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, width),), {}


def stages_of(cut: Blueprint, model: nn.Module) -> list[Stage]:
    """One stage per unit, with the values and the mode of `model`."""
    stages = [cut.stage(number, number + 1) for number in range(len(cut.units))]
    for stage in stages:
        give_values(stage, model)
        stage.module.train(model.training)
    return stages


def test_a_gpt_is_cut_into_embedding_blocks_and_the_rest() -> None:
    cut = assert_same_bits(models.GPT, tokens(4), tokens(1), tokens(3, 5))
    assert names(cut) == ["symbols", "blocks.0", "blocks.1", "blocks.2", "norm + head"]
    assert cut.units[0].parameters == ("symbols.weight", "places.weight")
    assert cut.units[4].parameters == ("symbols.weight", "norm.weight", "norm.bias")
    middle = cut.stage(1, 3)
    assert middle.receives == ("dropout",)
    assert middle.sends == ("blocks_1",)
    assert not middle.needs_batch
    assert [name for name, _ in middle.module.named_parameters()] == [
        name for name, _ in models.GPT().named_parameters() if name.startswith(("blocks.0", "blocks.1"))
    ]


def test_a_stage_holds_the_very_modules_of_the_model() -> None:
    model = models.GPT().to("meta")
    stage = make_blueprint(model, (torch.zeros(2, 8, dtype=torch.long, device="meta"),), {}).stage(0, 2)
    assert stage.module.get_submodule("blocks.0") is model.blocks[0]
    assert stage.module.get_submodule("places") is model.places


def test_more_stages_than_blocks_look_into_the_blocks_where_one_value_crosses() -> None:
    cut = assert_same_bits(models.GPT, tokens(4), at_least=8)
    assert len(cut.units) >= 8
    assert "blocks.1.norm2 + … + blocks.1.mlp.2" in names(cut)
    assert all(len(cut.stage(number, number + 1).receives) == 1 for number in range(1, len(cut.units)))


def test_named_modules_decide_where_stages_begin() -> None:
    cut = assert_same_bits(models.GPT, tokens(4), tokens(2), split=["blocks.2", "blocks.1"], at_least=3)
    assert names(cut) == ["symbols + blocks.0", "blocks.1", "blocks.2 + norm + head"]


def test_sequential_models_are_cut_by_layer_and_never_before_a_change_in_place() -> None:
    images = [((torch.randn(batch, 1, 8, 8),), {}) for batch in (4, 7)]
    cut = assert_same_bits(models.digits, *images)
    assert names(cut) == ["0", "1 + 2", "3", "4.0", "4.1", "4.2", "5", "6", "7"]


def test_values_and_sizes_that_skip_stages_are_passed_on() -> None:
    cut = assert_same_bits(models.UNet, rows(4), rows(6))
    assert len(cut.units) == 6
    assert len(cut.stage(3, 4).receives) == 3  # two that were kept, and the present one; the size is told by them


def test_a_block_that_changes_its_input_stays_with_what_made_it() -> None:
    cut = assert_same_bits(lambda: nn.Sequential(nn.Linear(8, 8), models.PreActivation(), nn.Linear(8, 2)), rows(4))
    assert names(cut) == ["0 + 1", "2"]
    assert "in place" in cut.refused[0]


def test_tuples_cross_as_their_tensors() -> None:
    cut = assert_same_bits(models.Recurrent, ((torch.randn(4, 5, 8),), {}), ((torch.randn(2, 3, 8),), {}))
    assert len(cut.units) == 3
    assert len(cut.stage(1, 2).receives) == 3


def test_what_only_looks_at_the_inputs_is_not_sent() -> None:
    def batch(size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = torch.ones(size, 6, dtype=torch.long)
        mask[0, 4:] = 0
        return (), {"mask": mask, "ids": torch.randint(0, 20, (size, 6))}

    cut = assert_same_bits(models.Masked, batch(4), batch(3))
    assert names(cut) == ["embed", "blocks.0", "blocks.1", "head"]
    assert len(cut.stage(2, 3).receives) == 1
    assert cut.stage(2, 3).needs_batch
    assert not cut.stage(3, 4).needs_batch


def test_changes_in_place_and_random_tensors_of_the_models_own_code() -> None:
    cut = assert_same_bits(models.InPlace, rows(4), rows(5))
    assert names(cut) == ["a + b", "c", "d"]
    assert cut.way == "torch.fx"


def test_what_was_changed_in_place_is_sent_and_not_worked_out_again() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift = x + 1
            shift[:, 0] = 5.0
            return self.b(self.a(x)) * shift

    cut = assert_same_bits(Net, rows(4))
    assert cut.way == "torch.fx"
    assert cut.stage(1, 2).receives == ("add", "a")


def test_a_layer_with_buffers_that_is_used_twice_is_not_cut_apart() -> None:
    assert names(assert_same_bits(models.Twice, rows(4))) == ["a", "norm + b", "c"]


def test_training_and_evaluation_may_do_different_things() -> None:
    cut = assert_same_bits(models.Auxiliary, rows(4), rows(2))
    assert names(cut) == ["blocks.0", "blocks.1 + side", "blocks.2", "head"]
    stage = cut.stage(3, 4)
    assert len(stage.receives) == 2
    stage.module.eval()
    assert len(stage.receives) == 1


def test_an_output_of_any_structure_comes_back_as_it_was() -> None:
    class Output(NamedTuple):
        logits: torch.Tensor
        others: OrderedDict[str, list[torch.Tensor]]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Output:
            x = self.a(x)
            return Output(self.b(x), OrderedDict(hidden=[x, x + 1]))

    assert len(assert_same_bits(Net, rows(4)).units) == 2


@pytest.mark.parametrize("make", [models.Python, models.InPlace])
def test_autocast_around_a_stage_is_autocast_around_the_model(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    args, _ = rows(4, 4 if make is models.Python else 8)
    stages = stages_of(blueprint_of(model, args), model)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(3)
        expected = model(*args)
        torch.manual_seed(3)
        output, _ = models.run(stages, args, {})
    assert torch.equal(output, expected)


def test_another_size_than_a_graph_holds_for_is_refused() -> None:
    class Net(models.Python):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[:, :4] + sum(range(x.shape[1])))

    model = Net()
    stages = stages_of(blueprint_of(model, (torch.randn(4, 6),)), model)
    models.run(stages, (torch.randn(9, 6),), {})
    with pytest.raises(JobError, match=r"for inputs of any × 6 and got one of 9 × 7"):
        models.run(stages, (torch.randn(9, 7),), {})


def test_a_model_whose_code_fixes_the_batch_size_is_refused() -> None:
    class Net(models.Python):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + sum(range(x.shape[0])))

    with pytest.raises(JobError, match="cannot be followed") as caught:
        blueprint_of(Net(), (torch.randn(4, 4),))
    assert "size()[0]" in caught.value.details


def test_export_follows_what_fx_cannot() -> None:
    cut = assert_same_bits(models.Python, rows(4, 4), rows(9, 4), rows(2, 4))
    assert len(cut.units) >= 4
    assert cut.way == "torch.export"
    assert "steps" in dict(cut.stage(0, 1).module.named_buffers())


def test_layers_of_torch_itself_are_opened_if_need_be() -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False
        )

    cut = assert_same_bits(make, ((torch.randn(4, 5, 8),), {}), ((torch.randn(2, 3, 8),), {}), at_least=3)
    assert len(cut.units) >= 3


def test_hooks_of_layers_run_in_the_stages() -> None:
    model = models.GPT().to("meta")
    model.blocks[1].mlp[0].register_forward_hook(lambda module, args, output: output * 0)
    cut = make_blueprint(model, (torch.zeros(2, 8, dtype=torch.long, device="meta"),), {}, at_least=8)
    number = next(n for n, unit in enumerate(cut.units) if "blocks.1.mlp.0.weight" in unit.parameters)
    stage = cut.stage(number, number + 1)
    stage.module.to_empty(device="cpu")
    for parameter in stage.module.parameters():
        nn.init.constant_(parameter, 0.5)
    stage.module.eval()
    x = torch.randn(2, 8, 16)
    (out,) = stage([x], (), {})
    assert torch.allclose(out, x + 0.5)  # gelu(0) through weights of 0.5, and the last bias


@pytest.fixture
def two_members() -> Iterator[DeviceMesh]:
    """A mesh of two of which this process is one; what it says to the other goes nowhere."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def divided_gpt(mesh: DeviceMesh) -> nn.Module:
    """On meta, with its MLPs and its vocabulary divided."""
    model = without_memory(models.GPT())
    styles: dict[str, ParallelStyle] = {"symbols": RowwiseParallel(input_layouts=Replicate())}
    for number in range(3):
        styles[f"blocks.{number}.mlp.0"] = ColwiseParallel()
        styles[f"blocks.{number}.mlp.2"] = RowwiseParallel()
    parallelize_module(model, mesh, styles)
    return model


@pytest.mark.parametrize("at_least", [2, 8])
def test_divided_layers_stay_divided(two_members: DeviceMesh, at_least: int) -> None:
    ids = torch.randint(0, 20, (4, 8))
    cut = make_blueprint(divided_gpt(two_members), (ids.to("meta"),), {}, at_least=at_least)
    stage = cut.stage(0, 3)
    inner = dict(stage.module.named_parameters())["blocks.0.mlp.0.weight"]
    assert isinstance(inner, DTensor)
    assert inner.shape == (32, 16)
    assert inner.to_local().shape == (16, 16)
    stage.module.to_empty(device="cpu")
    for parameter in stage.module.parameters():
        nn.init.constant_(parameter, 0.5)
    (out,) = stage((), (ids,), {})
    assert type(out) is torch.Tensor
    assert out.shape == (4, 8, 16)


def test_divided_layers_inside_a_module_that_looks_at_values(two_members: DeviceMesh) -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x)) if x.sum() > 0 else self.two(-self.one(x))

    model = without_memory(nn.Sequential(Looking(), Looking()))
    styles: dict[str, ParallelStyle] = {}
    for number in range(2):
        styles |= {f"{number}.one": ColwiseParallel(), f"{number}.two": RowwiseParallel()}
    parallelize_module(model, two_members, styles)
    args, _ = rows(4)
    cut = make_blueprint(model, on_meta(args), {}, split=["1"])
    assert names(cut) == ["0", "1"]
    assert len(measure(cut, args, {}, "cpu")) == 2
    assert model[0].one._forward_pre_hooks
    assert isinstance(model[0].one.weight, DTensor)


def test_divided_layers_are_measured_with_the_part_held_here(two_members: DeviceMesh) -> None:
    ids = torch.randint(0, 20, (4, 8))
    whole = measure(blueprint_of(models.GPT(), (ids,)), (ids,), {}, "cpu")
    model = divided_gpt(two_members)
    mine = measure(make_blueprint(model, (ids.to("meta"),), {}), (ids,), {}, "cpu")
    assert mine[1].bytes < whole[1].bytes
    assert model.blocks[0].mlp[0]._forward_pre_hooks
    assert isinstance(model.symbols.weight, DTensor)


def test_the_model_is_left_as_it_was() -> None:
    model = models.InPlace().to("meta")
    model.b.eval()
    args = on_meta(rows(4)[0])
    before = list(vars(model)), [module.training for module in model.modules()], torch.get_rng_state()
    make_blueprint(model, args, {})
    assert before[0] == list(vars(model))
    assert before[1] == [module.training for module in model.modules()]
    assert torch.equal(before[2], torch.get_rng_state())


def test_more_stages_than_units_says_how_many_there_are() -> None:
    with pytest.raises(JobError, match=r"into 9 stages, it has 3 units: 0 \| 1 \| 2") as caught:
        blueprint_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), *rows(4), at_least=9)
    assert "pipeline:3" in caught.value.hint


def test_control_flow_over_values_is_shown_with_its_line_and_the_way_out() -> None:
    with pytest.raises(JobError, match=r"models\.py:\d+: if x\.sum\(\) > 0") as caught:
        blueprint_of(models.DataDependent(), *rows(4), at_least=2)
    assert "split=" in caught.value.hint


@pytest.mark.filterwarnings("ignore:The tensor attribute")
def test_the_reason_is_no_talk_of_meta_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError, match=r"values are needed.*models\.py:\d+: .*if x\.sum\(\) > 0") as caught:
        blueprint_of(models.Routed(), *rows(4), at_least=2)
    assert "data-dependent" in caught.value.details  # export was tried as well
    assert "meta" not in str(caught.value)
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_control_flow_inside_named_modules_is_no_obstacle() -> None:
    taken = {bool(models.Router()(rows(4)[0][0]).grad_fn.name().startswith("NativeBatch")) for _ in range(40)}
    assert taken == {True, False}, "both branches are taken"
    batches = [rows(4), rows(3), rows(5), rows(2)]
    cut = assert_same_bits(models.Routed, *batches, split=["blocks.2", "blocks.1"])
    assert names(cut) == ["blocks.0", "blocks.1", "blocks.2 + head"]


def test_modules_that_look_at_values_may_change_and_share_what_they_are_given() -> None:
    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if x.abs().sum() > 0:
                x *= 2
            return x, x[:, :4]

    class Net(nn.Module):
        def __init__(self, late: bool = False) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), Doubling(), nn.Linear(4, 8), nn.Linear(8, 8)])
            self.late = late

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, doubling, second, last = self.layers
            x, part = doubling(first(x))
            if not self.late:
                part += 1  # and so a part of the whole
            y = second(part)
            if self.late:
                part += 1
            return last(y + x)

    with pytest.raises(JobError, match="changes in place what layers_0 made"):
        blueprint_of(Net(), *rows(4), split=["layers.1"])
    with pytest.raises(JobError, match="iadd changes in place what layers_0 made"):
        blueprint_of(Net(late=True), *rows(4), split=["layers.2"])
    assert names(assert_same_bits(Net, rows(4), rows(3), split=["layers.2"])) == [
        "layers.0 + layers.1",
        "layers.2 + layers.3",
    ]


def test_a_buffer_that_such_a_module_may_change_keeps_its_uses_together() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 1e9:
                self.seen += 1
            return x + self.seen

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Sometimes(), nn.Linear(8, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](self.layers[1](self.layers[0](x)))

    with pytest.raises(JobError, match="changes in place"):
        blueprint_of(Net(), *rows(4), split=["layers.1"])


def test_a_tensor_in_a_list_has_no_name_to_be_read_by() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.tables = nn.Linear(8, 8), nn.Linear(8, 8), [torch.ones(8, device="meta")]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) * self.tables[0])

    with pytest.raises(JobError, match="register them as buffers"):
        blueprint_of(Net(), *rows(4))


def test_plain_attributes_are_read_by_their_names() -> None:
    cut = assert_same_bits(models.PlainAttributes, rows(4), rows(3))
    assert names(cut) == ["blocks.0", "blocks.1", "blocks.2", "head"]
    deep = assert_same_bits(models.PlainAttributes, rows(4), rows(3), at_least=7)
    assert len(deep.units) == 7
    assert deep.way == "torch.fx"
    held = [name for name, _ in deep.stage(len(deep.units) - 1, len(deep.units)).module.named_parameters()]
    assert held == ["head.weight", "head.bias"]  # the offset of another module comes without its weights


def test_plain_attributes_are_read_by_their_names_in_exported_graphs() -> None:
    cut = assert_same_bits(lambda: models.PlainAttributes(over_shapes=True), rows(4), rows(3), at_least=3)
    assert cut.way == "torch.export"


def test_modules_that_the_model_keeps_from_training_are_not_trained() -> None:
    cut = assert_same_bits(models.FrozenNorm, rows(4), rows(3))
    frozen = names(cut).index("blocks.1.1")
    stage = cut.stage(frozen, frozen + 1)
    assert not stage.module.train().get_submodule("blocks.1.1").training


@pytest.mark.parametrize("make", [models.FrozenNorm, models.digits])
def test_forward_of_all_shards_before_any_backward_gives_the_gradients_of_one_after_the_other(
    make: Callable[[], nn.Module],
) -> None:
    """Backward of a frozen normalisation reads its running statistics, and these are put back before each shard."""
    torch.manual_seed(0)
    model = make().train()
    shards = [torch.randn(size, *((8,) if make is models.FrozenNorm else (1, 8, 8))) for size in (4, 3, 5)]
    cut = blueprint_of(model, (shards[0],))
    stages = stages_of(cut, copy.deepcopy(model))
    buffers = [ShardBuffers(stage.module) for stage in stages]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for number, x in enumerate(shards):
        torch.manual_seed(number)
        model.load_state_dict(before, strict=False)
        model(x).square().sum().backward()
    passages = []
    for number, x in enumerate(shards):
        torch.manual_seed(number)
        for one in buffers:
            one.lend()
        passages.append(models.run(stages, (x,), {}))
        for one in buffers:
            one.collect()
    for output, crossed in passages:
        models.backward(output.square().sum(), crossed)
    mine = {name: parameter for stage in stages for name, parameter in stage.module.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, mine[name].grad), name
    for one in buffers:
        one.commit(len(shards))
    after = {name: buffer for stage in stages for name, buffer in stage.module.named_buffers()}
    moved = {name for name, buffer in after.items() if not torch.equal(buffer, before[name])}
    assert {name.rpartition(".")[0] for name in moved} == ({"norm"} if make is models.FrozenNorm else {"1", "4.1"})


def test_hooks_of_the_model_itself_are_refused() -> None:
    model = models.GPT()
    model.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(JobError, match="forward hooks"):
        blueprint_of(model, *tokens(4))


def test_a_name_that_is_no_module_lists_near_ones() -> None:
    with pytest.raises(JobError, match=r"no module 'block\.1'") as caught:
        blueprint_of(models.GPT(), *tokens(4), split=["block.1"])
    assert "'blocks.1'" in caught.value.hint


def test_a_named_module_that_is_never_called_is_refused() -> None:
    with pytest.raises(JobError, match="'places', because the model never calls"):
        blueprint_of(models.GPT(), *tokens(4), split=["places"])


def test_a_value_that_cannot_be_sent_is_named() -> None:
    class Pair:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    class Wrap(nn.Module):
        def forward(self, x: torch.Tensor) -> Pair:
            return Pair(x)

    class Unwrap(nn.Module):
        def forward(self, pair: Pair) -> torch.Tensor:
            return pair.x

    model = nn.Sequential(nn.Linear(8, 8), Wrap(), Unwrap(), nn.Linear(8, 2))
    with pytest.raises(JobError, match=r"begin at 2: the value _1 would have to be sent and is a Pair"):
        blueprint_of(model, *rows(4), split=["2"])
    assert names(assert_same_bits(lambda: model, rows(4))) == ["0", "1 + 2", "3"]


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_transformers_models_built_from_a_config(kind: str) -> None:
    transformers = pytest.importorskip("transformers")

    def make() -> nn.Module:
        if kind == "gpt2":
            small = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 16}
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, bos_token_id=1, eos_token_id=1))
        small = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
        return transformers.BertForSequenceClassification(transformers.BertConfig(**small, vocab_size=40))

    def batch(size: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = torch.randint(0, 40, (size, length))
        mask = torch.ones_like(ids)
        mask[0, length - 2 :] = 0
        return (), {"input_ids": ids, "attention_mask": mask}

    cut = assert_same_bits(make, batch(4, 8), batch(3, 8), batch(1, 8), at_least=2)
    assert len(cut.units) == 4  # embeddings, two blocks, head
    assert all(len(cut.stage(number, number + 1).receives) == 1 for number in range(1, len(cut.units)))
