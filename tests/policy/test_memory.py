"""Weights in huge pages: the same parameters to the bit for whatever uses them, side by side in memory that is the process's own."""

from __future__ import annotations

import copy
import errno
import gc
import mmap
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from swarm_node.checkpoint import Checkpoint, load_latest, save_checkpoint
from swarm_node.learning.optimiser import Optimiser
from swarm_node.learning.options import LearningOptions
from swarm_node.policy import memory
from swarm_node.policy.loading import load_policy
from swarm_node.policy.memory import move_to_huge_pages
from swarm_node.policy.options import ModelOptions
from swarm_node.rollout.vllm.weights import merged_weights
from tests.support.policies import character_tokenizer, family_model, random_model, random_policy

MIB = 2**20
IDS = torch.tensor([[5, 6, 7, 8]])
M = TypeVar("M", bound=nn.Module)
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these pages")


def large_model(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """14 MB of float32, its head tied to its embedding."""
    changes = {"hidden_size": 512, "intermediate_size": 1024, "tie_word_embeddings": True} | changes
    model = family_model("llama", layers=2, **changes)
    assert isinstance(model, LlamaForCausalLM)
    return nn.Module.to(model, dtype)


def moved(model: M) -> M:
    move_to_huge_pages(model)
    return model


def addresses(model: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8)


def buffers(model: nn.Module) -> list[list[nn.Parameter]]:
    """Parameters that lie one after another, each at the first cache line after the one before."""
    found: list[list[nn.Parameter]] = []
    end = 0
    for parameter in model.parameters():
        if -(-end // 64) * 64 != parameter.data_ptr():
            found.append([])
        found[-1].append(parameter)
        end = parameter.data_ptr() + parameter.nbytes
    return found


def large_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            start, end = (int(bound, 16) for bound in first.split("-"))
            inside = start <= address < end
        elif inside and first == "AnonHugePages:":
            return int(rest[0]) * 1024
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[mmap.mmap]]:
    """The buffers that are made, as long as something else holds them."""
    made: list[weakref.ref[mmap.mmap]] = []
    allocate = memory._allocate

    def remember(size: int) -> tuple[mmap.mmap, int]:
        buffer, offset = allocate(size)
        made.append(weakref.ref(buffer))
        return buffer, offset

    monkeypatch.setattr(memory, "_allocate", remember)
    return made


@linux
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_moves_and_none_changes(dtype: torch.dtype) -> None:
    model = large_model(dtype)
    next(model.parameters()).requires_grad_(False)
    with torch.no_grad():
        next(model.parameters())[0, :3] = torch.tensor([float("nan"), -0.0, 1e-40])
    before = {name: (parameter, parameter.detach().clone(), parameter.requires_grad) for name, parameter in model.named_parameters()}
    old = addresses(model)
    move_to_huge_pages(model)
    assert not set(addresses(model)) & set(old)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, (parameter, value, trained) in before.items():
        assert after[name] is parameter
        assert parameter.shape == value.shape
        assert parameter.dtype == dtype
        assert torch.equal(bits(parameter), bits(value))
        assert parameter.requires_grad == trained


@linux
def test_parameters_lie_side_by_side_from_the_start_of_a_large_page_each_in_a_storage_of_its_own() -> None:
    model = moved(large_model(hidden_size=520))  # a norm's 2,080 bytes do not end with a cache line
    (buffer,) = buffers(model)
    assert len(buffer) == 20
    assert buffer[0].data_ptr() % (2 * MIB) == 0
    for parameter in buffer:
        assert parameter.data_ptr() % 64 == 0
        assert parameter.untyped_storage().data_ptr() == parameter.data_ptr()
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter.is_contiguous()


@linux
def test_they_start_on_a_large_page_wherever_the_kernel_puts_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PAGE", 64 * MIB)  # new kernels align to 2 MiB by themselves, and to 64 MiB by chance alone
    models = []
    for value in range(3):
        models.append(moved(nn.ParameterList([torch.full((64, MIB // 4), float(value))])))
    assert all(model[0].data_ptr() % (64 * MIB) == 0 for model in models)
    assert all(bool((model[0] == value).all()) for value, model in enumerate(models))


@linux
def test_a_buffer_is_bounded_but_for_a_larger_parameter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_BUFFER", 4 * MIB)
    model = nn.ModuleList(nn.Linear(256, rows, bias=False) for rows in (1024, 1024, 1024, 2048, 512, 6 * 1024, 1024, 1024, 1024, 1024, 1))
    values = [parameter.detach().clone() for parameter in model.parameters()]
    move_to_huge_pages(model)
    sizes = [[parameter.nbytes // 1024 for parameter in buffer] for buffer in buffers(model)]
    assert sizes == [[1024, 1024, 1024], [2048, 512], [6 * 1024], [1024] * 4, [1]]
    assert all(buffer[0].data_ptr() % (2 * MIB) == 0 for buffer in buffers(model))
    assert all(torch.equal(parameter, value) for parameter, value in zip(model.parameters(), values, strict=True))


@linux
def test_the_kernel_backs_them_with_large_pages_where_it_may() -> None:
    model = moved(large_model())
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not switch.is_file() or "[never]" in switch.read_text():
        pytest.skip("this kernel gives none")
    assert large_bytes(next(model.parameters()).data_ptr()) > 0


@linux
def test_a_tied_head_stays_tied() -> None:
    model = moved(large_model())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(list(model.parameters())) == 20
    with torch.no_grad():
        model.lm_head.weight[3, 4] = 7.0
    assert model.model.embed_tokens.weight[3, 4] == 7.0


@linux
def test_views_of_one_storage_stay_where_they_are_and_the_rest_moves() -> None:
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(3)]
    model = nn.ModuleList(layers)
    packed = torch.zeros(2, 1024, 1024)
    layers[0].weight.data, layers[1].weight.data = packed[0], packed[1]
    model.register_buffer("kept", layers[2].weight.data)
    model.append(nn.Linear(1024, 1024))
    old = addresses(model)
    move_to_huge_pages(model)
    assert [new == before for new, before in zip(addresses(model), old, strict=True)] == [True, True, True, False, False]
    packed += 1
    assert bool((layers[1].weight == 1).all())


@linux
def test_a_transposed_parameter_keeps_its_values() -> None:
    model = nn.Linear(1024, 1024, bias=False)
    model.weight.data = torch.randn(1024, 1024).T
    value = model.weight.detach().clone()
    assert torch.equal(moved(model).weight, value)


@linux
def test_empty_parameters_do_no_harm() -> None:
    model = nn.Linear(1024, 1024)
    model.empty = nn.Parameter(torch.empty(0, 4))
    old = model.weight.data_ptr()
    move_to_huge_pages(model)
    assert model.weight.data_ptr() != old
    assert model.empty.shape == (0, 4)


def test_a_model_of_less_than_a_page_stays_where_it_is() -> None:
    model = random_model()
    old = addresses(model)
    assert addresses(moved(model)) == old


def test_a_model_on_another_device_stays_where_it_is() -> None:
    with torch.device("meta"):
        model = nn.Linear(1024, 1024, bias=False)
    assert moved(model).weight.device.type == "meta"


@pytest.mark.parametrize("lacking", ["another system", "no huge pages", "no memory"])
def test_without_such_memory_a_model_stays_where_it_is(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    class Refusing(mmap.mmap):
        def __new__(cls, *arguments: Any, **named: Any) -> Refusing:
            if lacking == "no memory":
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return super().__new__(cls, *arguments, **named)

        def madvise(self, *arguments: object) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    model = large_model()
    old = addresses(model)
    with monkeypatch.context() as patch:
        if lacking == "another system":
            patch.setattr(sys, "platform", "darwin")
        else:
            patch.setattr(mmap, "mmap", Refusing)
        move_to_huge_pages(model)
    assert addresses(model) == old


@linux
def test_a_buffer_lives_as_long_as_a_tensor_in_it(allocated: list[weakref.ref[mmap.mmap]]) -> None:
    model = moved(large_model())
    norm = model.model.norm.weight.detach()
    (buffer,) = allocated
    del model
    gc.collect()
    assert buffer() is not None
    assert bool((norm == 1).all())
    del norm
    assert buffer() is None


@linux
def test_memory_grows_by_no_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_BUFFER", 8 * MIB)
    made: list[nn.Module] = []

    def make() -> None:
        # glibc takes from the kernel directly, and gives back at once, only what is larger than anything freed so far.
        torch.zeros(24 * MIB, dtype=torch.uint8)
        made.append(nn.ModuleList(nn.Linear(256, 1024) for _ in range(64)))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    before = psutil.Process().memory_info().rss
    move_to_huge_pages(made[0])
    assert psutil.Process().memory_info().rss - before < 32 * MIB, "64 MiB moved, 8 MiB at a time"


@linux
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_a_copy_is_equal_and_independent(duplicate: Callable[[LlamaForCausalLM], LlamaForCausalLM]) -> None:
    model = moved(large_model())
    other = duplicate(model)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert bool((other.model.norm.weight == 1).all())


@linux
def test_a_forked_child_writes_to_a_copy_of_its_own(one_thread: None) -> None:
    norm = moved(large_model()).model.norm.weight.detach()
    child = os.fork()
    if not child:
        norm[0] = 5.0
        os._exit(int(norm[0] != 5.0))
    assert os.waitpid(child, 0)[1] == 0
    assert norm[0] == 1.0


@linux
def test_a_saved_model_is_the_same_model(tmp_path: Path) -> None:
    plain = large_model()
    copy.deepcopy(plain).save_pretrained(tmp_path / "plain")
    moved(plain).save_pretrained(tmp_path / "moved")
    assert (tmp_path / "moved" / "model.safetensors").read_bytes() == (tmp_path / "plain" / "model.safetensors").read_bytes()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "moved")
    assert all(torch.equal(one, two) for one, two in zip(again.parameters(), plain.parameters(), strict=True))


@linux
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_and_resuming_go_as_in_plain_memory(tmp_path: Path, dtype: torch.dtype, one_thread: None) -> None:
    plain = large_model(dtype)
    large = moved(copy.deepcopy(plain))
    places = addresses(large)
    weights = []
    for model in (plain, large):
        policy = random_policy(model=model)
        optimiser = Optimiser(policy.trainable(), LearningOptions())
        for _ in range(2):
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimiser.collect()
            optimiser.step(1e-3)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*weights, strict=True))
    assert not torch.equal(weights[1][0], large_model(dtype).model.embed_tokens.weight), "something was learned"
    assert addresses(large) == places

    saved = {name: parameter.detach() for name, parameter in policy.trainable().items()}
    save_checkpoint(tmp_path, Checkpoint(step=2, weights=saved, optimiser=optimiser.state_dict(), state={}))
    resumed = random_policy(model=moved(large_model(dtype)))
    places = addresses(resumed.model)
    checkpoint = load_latest(tmp_path)
    assert checkpoint is not None
    resumed.load_weights(checkpoint.weights)
    Optimiser(resumed.trainable(), LearningOptions()).load_state_dict(checkpoint.optimiser)
    assert all(torch.equal(one, two) for one, two in zip(resumed.model.parameters(), weights[1], strict=True))
    assert addresses(resumed.model) == places


@linux
@pytest.mark.parametrize(("dtype", "lora"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_a_loaded_policy_lies_in_large_pages_adapters_and_all(tmp_path: Path, dtype: str, lora: bool) -> None:
    model = large_model(hidden_size=1024)
    model.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    options = {"name": str(tmp_path), "device": "cpu", "dtype": dtype, "lora": lora}
    policy = load_policy(ModelOptions.model_validate(options))
    (buffer,) = buffers(policy.model)
    assert len(buffer) == (20 + 2 * 7 * 2 if lora else 20)
    assert buffer[0].data_ptr() % (2 * MIB) == 0
    merged = dict(merged_weights(policy.model))
    expected = {name: parameter.to(policy.dtype) for name, parameter in model.named_parameters()}
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], parameter) for name, parameter in expected.items()), "fresh adapters change nothing"
