"""DeferredModel: any part of a model gets the bits of one process, whatever its constructor does, in little memory."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distbelief.data.sources import seed_everything
from distbelief.errors import JobError
from distbelief.strategies.mesh.init.deferred import DeferredModel, make_deferred
from tests.support.mesh.constructors import MODELS, OUTSIDE, default_types, gpt_like, holding

SEED = 11


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named.items()}


def made_plainly(make: Callable[[], nn.Module]) -> nn.Module:
    outside = OUTSIDE.get_state()
    seed_everything(SEED)
    model = make()
    OUTSIDE.set_state(outside)
    return model


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Of one type and shape too, and laid out in the same way, unless there are holes between the numbers."""
    dense = torch.empty_like(two)
    if one.dtype != two.dtype or one.shape != two.shape or one.stride() not in (two.stride(), dense.stride()):
        return False
    return as_bytes(one) == as_bytes(two)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def streams() -> tuple[bytes, bytes, object, bytes]:
    torch_state, outside = torch.get_rng_state().numpy().tobytes(), OUTSIDE.get_state().numpy().tobytes()
    return torch_state, np.random.get_state()[1].tobytes(), random.getstate(), outside


@pytest.fixture(params=MODELS)
def make(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    return MODELS[request.param]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_value_has_the_bits_of_one_process(make: Callable[[], nn.Module]) -> None:
    expected = made_plainly(make)
    tensors = all_tensors(expected)
    seed_everything(99)
    before = streams()
    deferred = make_deferred(make, SEED)
    assert streams() == before
    for _ in range(2):
        values = dict(deferred.values(tensors))
        assert values.keys() == tensors.keys()
        assert [name for name in tensors if not same_bits(values[name], tensors[name])] == []
        for value in values.values():
            value.fill_(1)  # it is the caller's: the next time is not changed by this
    assert streams() == before

    born = dict(deferred.model.named_parameters()) | dict(deferred.model.named_buffers())
    assert all(tensor.is_meta for tensor in born.values())
    assert list(born) == [n for n, _ in expected.named_parameters()] + [n for n, _ in expected.named_buffers()]
    for name, parameter in expected.named_parameters():
        assert (born[name].shape, born[name].dtype) == (parameter.shape, parameter.dtype)
        assert born[name].requires_grad == parameter.requires_grad
    assert str(deferred.model) == str(expected)
    assert deferred.model.training


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_each_one_alone_has_them_too_in_any_order(make: Callable[[], nn.Module]) -> None:
    tensors = all_tensors(made_plainly(make))
    deferred = make_deferred(make, SEED)
    for name in random.Random(5).sample(list(tensors), len(tensors)):
        ((given, value),) = deferred.values([name])
        assert given == name
        assert same_bits(value, tensors[name]), name


def test_the_callers_stream_is_its_own_between_two_values() -> None:
    deferred = make_deferred(MODELS["attention"], SEED)
    tensors = all_tensors(made_plainly(MODELS["attention"]))
    torch.manual_seed(1)
    alone = [torch.rand(3).tolist() for _ in tensors]
    torch.manual_seed(1)
    between = []
    for name, value in deferred.values(tensors):
        between.append(torch.rand(3).tolist())
        assert same_bits(value, tensors[name])
    assert between == alone


def interpret(program: list[tuple[str, int, int]]) -> nn.Module:
    """A constructor that was never thought of: each line works on tensors, generators and states made before it."""
    tensors, states, own = [torch.ones(4, 6)], [torch.get_rng_state()], torch.Generator().manual_seed(1)
    for what, first, second in program:
        one, other = tensors[first % len(tensors)], tensors[second % len(tensors)]
        match what:
            case "draw":
                tensors.append(torch.randn(4, 6))
            case "fill":
                one.uniform_(-1, second + 1)
            case "own":
                tensors.append(torch.empty(4, 6).normal_(generator=own))
            case "seed":
                torch.manual_seed(second % 2)
            case "seed own":
                own.manual_seed(second % 2)
            case "save":
                states.append(torch.get_rng_state())
            case "restore":
                torch.set_rng_state(states[first % len(states)])
            case "row":
                one[second % len(one)].mul_(1.5)
            case "part":
                tensors.append(one[: 1 + second % len(one)])
            case "add":
                one.copy_((one + other[:1]) / 2)
            case "order":
                tensors.append(one[torch.randperm(len(one))])
            case "read":
                one.add_(round(other.sum().item(), 3))
            case "choose":
                tensors.append(one[:, one[0] > other[0].mean()].sum(1, keepdim=True).expand(-1, 6).contiguous())
    return nn.ParameterList(tensors)


WORDS = ["draw", "fill", "own", "seed", "seed own", "save", "restore", "row", "part", "add", "order", "read", "choose"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 9), st.integers(0, 9)), max_size=25),
    st.sets(st.integers()),
)
def test_any_program_gives_any_part_the_bits_of_one_process(
    program: list[tuple[str, int, int]], part: set[int]
) -> None:
    tensors = all_tensors(made_plainly(lambda: interpret(program)))
    deferred = make_deferred(lambda: interpret(program), SEED)
    for wanted in ({str(number % len(tensors)) for number in part}, tensors.keys()):
        values = dict(deferred.values(wanted))
        assert values.keys() == wanted
        assert [name for name in wanted if not same_bits(values[name], tensors[name])] == []


def test_what_the_caller_has_set_does_not_matter() -> None:
    tensors = all_tensors(made_plainly(default_types))
    deferred = make_deferred(default_types, SEED)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"), torch.inference_mode():
            values = dict(deferred.values(tensors))
        assert torch.get_default_dtype() is torch.float16
    finally:
        torch.set_default_dtype(torch.float32)
    assert [name for name in tensors if not same_bits(values[name], tensors[name])] == []


class LiveBytes(TorchDispatchMode):
    """The most bytes of CPU storages, made while it is entered, that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {at: known for at, known in self.alive.items() if not known[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(count)))


LAYER_BYTES = 4 * 64 * 64 + 4 * 64


def test_making_takes_no_memory_and_a_part_takes_that_part_and_one_temporary() -> None:
    with LiveBytes() as making:
        deferred = make_deferred(lambda: layers(40), SEED)
    assert making.peak < LAYER_BYTES
    wanted = [name for name, _ in deferred.model.named_parameters() if name.startswith(("20.", "21."))]
    for _ in range(2):
        with LiveBytes() as part:
            values = dict(deferred.values(wanted))
        assert 2 * LAYER_BYTES <= part.peak <= 3 * LAYER_BYTES
        del values


def test_values_that_are_not_kept_take_no_memory() -> None:
    deferred = make_deferred(lambda: layers(20), SEED)
    with LiveBytes() as one_by_one:
        for name, value in deferred.values([name for name, _ in deferred.model.named_parameters()]):
            assert value.any(), name
            del value
    assert one_by_one.peak <= 2 * LAYER_BYTES


def test_the_second_time_starts_from_states_that_are_known() -> None:
    """Only what is wanted is drawn again, when much was drawn before it."""

    class Draws(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.numbers += result.numel()
            return result

    deferred = make_deferred(lambda: nn.Sequential(*(nn.Linear(1024, 512) for _ in range(8))), SEED)
    tensors = all_tensors(made_plainly(lambda: nn.Sequential(*(nn.Linear(1024, 512) for _ in range(8)))))
    drawn = []
    for _ in range(2):
        with Draws() as draws:
            ((_, value),) = deferred.values(["7.weight"])
        drawn.append(draws.numbers)
        assert same_bits(value, tensors["7.weight"])
    assert drawn[0] == sum(tensors[name].numel() for name in tensors if name != "7.bias")
    assert drawn[1] <= drawn[0] / 3


def test_tied_parameters_stay_one_and_have_both_names() -> None:
    deferred = make_deferred(gpt_like, SEED)
    assert deferred.model.head.weight is deferred.model.token.weight
    values = dict(deferred.values(["head.weight", "token.weight"]))
    assert values["head.weight"].data_ptr() == values["token.weight"].data_ptr()


def test_a_model_that_is_made_already_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.add_module("again", model[0])
    model[0].bias.requires_grad_(False)
    deferred = make_deferred(lambda: model, SEED)
    tensors = {name: tensor.clone() for name, tensor in all_tensors(model).items()}
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert all(tensor.is_meta for tensor in deferred.model.state_dict().values())
    assert deferred.model.again is deferred.model[0]
    assert not deferred.model[0].bias.requires_grad
    values = dict(deferred.values(tensors))
    values["0.weight"].zero_()
    assert all(same_bits(tensor, tensors[name]) for name, tensor in all_tensors(model).items())
    assert all(same_bits(value, tensors[name]) for name, value in deferred.values(tensors))


def test_a_model_that_is_made_already_may_be_initialised_again_without_changing_it() -> None:
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()

    def reset() -> nn.Module:
        model.weight.data.mul_(2)
        nn.init.normal_(model.bias)
        return model

    deferred = make_deferred(reset, SEED)
    assert same_bits(model.weight.detach(), before)
    seed_everything(SEED)
    values = dict(deferred.values(["weight", "bias"]))
    assert same_bits(values["weight"], before * 2)
    assert same_bits(values["bias"], torch.randn(4))


def test_tensors_in_plain_attributes_are_known_by_name() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.scale = torch.rand(3)

    deferred = make_deferred(lambda: nn.Sequential(Scaled()), SEED)
    assert deferred.plain_attributes == ("0.scale",)
    ((_, value),) = deferred.values(deferred.plain_attributes)
    assert same_bits(value, made_plainly(Scaled).scale)


def unseen_draws() -> nn.Module:
    first = nn.Linear(3, 3)
    thread = threading.Thread(target=torch.rand, args=(5,))
    thread.start()
    thread.join()
    return nn.Sequential(first, nn.Linear(3, 3))


def writes_into_the_array() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.detach().numpy()[0] = 1
    return layer


def stays_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 3))


def copies_a_state() -> nn.Module:
    state = torch.get_rng_state().clone()
    layer = nn.Linear(3, 3)
    torch.set_rng_state(state)
    return layer


def by_address() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.data_ptr()
    return layer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (unseen_draws, "drawn in another thread"),
        (writes_into_the_array, "read-only"),
        (stays_on_meta, "'0.weight' was left on the meta device"),
        (by_address, "data_ptr"),
        (copies_a_state, "RNG state"),
        (lambda: pickle.loads(pickle.dumps(nn.Linear(3, 3))), "untyped_storage"),
        *([(lambda: nn.Linear(3, 3, device="cuda"), "cuda")] if torch.cuda.is_available() else []),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "lazy"),
        (lambda: [nn.Linear(3, 3)], "made a list, not a torch.nn.Module"),
        (lambda: holding(x=torch.rand(3, 3).to_sparse()), "sparse"),
    ],
)
def test_what_cannot_be_followed_is_said_in_one_message(make: Callable[[], nn.Module], words: str) -> None:
    before = streams()
    with pytest.raises(JobError, match=words):
        make_deferred(make, SEED)
    assert streams() == before


def test_a_mistake_in_the_constructor_is_shown_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        make_deferred(lambda: nn.Linear(3, 4)(torch.rand(2, 5)), SEED)


def test_an_array_that_changes_after_the_model_was_made_from_it_is_noticed() -> None:
    array = np.ones(3, np.float32)
    deferred = make_deferred(lambda: holding(x=torch.from_numpy(array)), SEED)
    array[0] = 2
    with pytest.raises(JobError, match="changed since"):
        list(deferred.values(["x"]))


TRANSFORMERS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 60}),
    "bert": (
        "BertForSequenceClassification",
        "BertConfig",
        {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 60,
        },
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 60,
        },
    ),
}


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_models_of_transformers_made_from_a_config(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, config, sizes = TRANSFORMERS[family]

    def make() -> nn.Module:
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        return made

    plain = made_plainly(make)
    tensors = all_tensors(plain)
    deferred: DeferredModel = make_deferred(make, SEED)
    values = dict(deferred.values(tensors))
    assert [name for name in tensors if not same_bits(values[name], tensors[name])] == []
    tied = [name for name in tensors if name not in dict(plain.named_parameters()) | dict(plain.named_buffers())]
    assert tied == [
        name
        for name in all_tensors(deferred.model)
        if name not in dict(deferred.model.named_parameters()) | dict(deferred.model.named_buffers())
    ]
