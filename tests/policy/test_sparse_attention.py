"""The teacher-forced sparse forward equals decoding token by token with the kernels' naive functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from swarm_kernels.interface import Attention, NewTokens, Selection
from swarm_kernels.layout import PageLayout, allocate
from swarm_kernels.naive.append import append
from swarm_kernels.naive.attention import attend
from swarm_kernels.naive.selection import select_pages
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarm_node.policy import sparse_attention as module
from swarm_node.policy.sparse_attention import DENSE_LAYERS, choose_pages, completion_hidden, sparse_attention, sparse_positions
from tests.support.rounding import rounding

HEADS, KV_HEADS, SIZE, LAYERS = 4, 2, 32, 4
DENSE = 1 << 20


def model_of(layers: int = LAYERS) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.eval()
    return model


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode(model: LlamaForCausalLM, prompt: Tensor, completion: Tensor, budgets: np.ndarray) -> Tensor:
    """Log-probs (T, V), one token at a time over a paged cache with a permuted table; the prompt is dense."""
    length = len(prompt) + len(completion) - 1
    pages = -(-length // 16)
    caches = allocate(PageLayout(model.config.num_hidden_layers, pages, KV_HEADS, SIZE, dtype=torch.float32))
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).int()[None]
    hidden_states = []
    for position, token in enumerate(torch.cat([prompt, completion[:-1]]).tolist()):
        hidden = model.model.embed_tokens(torch.tensor([token]))
        cosines, sines = model.model.rotary_emb(hidden, torch.tensor([[position]]))
        lengths = torch.tensor([position + 1], dtype=torch.int32)
        slot = table[0, position // 16].long()[None] * 16 + position % 16
        for index, (layer, cache) in enumerate(zip(model.model.layers, caches, strict=True)):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            query, keys, values = (part(normed).view(1, -1, SIZE) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
            append(cache, NewTokens(keys, values, slot, query, cosines[0], sines[0]))
            chosen = None
            if position >= len(prompt) and index >= DENSE_LAYERS:
                budget = torch.tensor([budgets[position - len(prompt)]], dtype=torch.int32)
                chosen = select_pages(cache, Selection(query, table, lengths, budget, min(int(budget) + 3, pages + 3)))
            out, _ = attend(cache, Attention(query, table, lengths, SIZE**-0.5, chosen))
            hidden = hidden + attention.o_proj(out.flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        hidden_states.append(model.model.norm(hidden))
    logits: Tensor = model.lm_head(torch.cat(hidden_states))
    return logits[len(prompt) - 1 :].log_softmax(-1)


def logprobs(model: LlamaForCausalLM, prompt: Tensor, completion: Tensor, budgets: np.ndarray | None) -> Tensor:
    logits: Tensor = model.lm_head(completion_hidden(model, prompt, completion, budgets))
    return logits.log_softmax(-1)


@pytest.mark.parametrize("budget", [1, 2, 4])
@pytest.mark.parametrize("length", [(1, 130), (16, 96), (33, 97), (95, 34), (100, 12), (140, 1)])
def test_it_equals_decoding_token_by_token(budget: int, length: tuple[int, int]) -> None:
    model = model_of()
    prompt, completion = tokens(length[0]), tokens(length[1], seed=1)
    budgets = np.full(length[1] - 1, budget)
    with torch.no_grad():
        found = logprobs(model, prompt, completion, budgets)
    tolerance = rounding(model, torch.cat([prompt, completion]))
    torch.testing.assert_close(found, decode(model, prompt, completion, budgets), rtol=0, atol=tolerance)


def test_budgets_hold_position_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERIES", 7)  # several chunks, none of them whole pages
    model = model_of()
    prompt, completion = tokens(50), tokens(90, seed=1)
    budgets = np.where(np.arange(89) % 3 == 0, DENSE, np.arange(89) % 3)
    with torch.no_grad():
        found = logprobs(model, prompt, completion, budgets)
        tolerance = rounding(model, torch.cat([prompt, completion]))
        torch.testing.assert_close(found, decode(model, prompt, completion, budgets), rtol=0, atol=tolerance)
        assert float((found - logprobs(model, prompt, completion, None)).abs().max()) > 0.1, "sparse and dense differ in this test"


def test_a_budget_of_all_pages_is_the_plain_forward() -> None:
    model = model_of()
    prompt, completion = tokens(60), tokens(100, seed=1)
    with torch.no_grad():
        plain = model(torch.cat([prompt, completion])[None]).logits[0, 59:-1].log_softmax(-1)
        tolerance = rounding(model, torch.cat([prompt, completion]))
        for budget in (7, DENSE):  # 159 positions are ten pages
            torch.testing.assert_close(logprobs(model, prompt, completion, np.full(99, budget)), plain, rtol=0, atol=tolerance)
        assert float((logprobs(model, prompt, completion, np.full(99, 6)) - plain).abs().max()) > 1e-3, "one page fewer is felt"


def test_a_model_of_dense_layers_alone_is_never_sparse() -> None:
    model = model_of(layers=DENSE_LAYERS)
    prompt, completion = tokens(60), tokens(60, seed=1)
    tolerance = rounding(model, torch.cat([prompt, completion]))
    with torch.no_grad():
        torch.testing.assert_close(
            logprobs(model, prompt, completion, np.full(59, 1)), logprobs(model, prompt, completion, None), rtol=0, atol=tolerance
        )


def test_the_sparse_positions_are_those_with_more_pages_than_budget_and_reserved() -> None:
    # With a budget of 1 four pages are whole: positions to 63 are dense.
    assert sparse_positions(60, np.full(8, 1)).tolist() == [False] * 4 + [True] * 4
    assert not sparse_positions(1000, np.full(8, DENSE)).any()


def test_of_equal_scores_the_earlier_page_wins_and_the_reserved_are_always_there() -> None:
    keys = torch.ones(1, 100, 4)  # seven pages, the last of them partial
    chosen = choose_pages(torch.ones(2, 1, 4), keys, 99, torch.tensor([2]))
    assert chosen[0, 0].tolist() == [True, True, True, False, False, True, True]
    keys[:, 64:80] *= 2
    chosen = choose_pages(torch.ones(2, 1, 4), keys, 99, torch.tensor([2]))
    assert chosen[0, 0].tolist() == [True, True, False, False, True, True, True]


def test_the_gradient_is_that_of_attention_over_the_chosen_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERIES", 16)
    generator = torch.Generator().manual_seed(5)
    query, keys, values = (
        torch.randn(1, heads, 100, 4, dtype=torch.float64, generator=generator, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    class Layer(torch.nn.Identity):
        layer_idx = DENSE_LAYERS

    def attention(*parts: Tensor) -> Tensor:
        out: Tensor = ALL_ATTENTION_FUNCTIONS["swarm_sparse"](Layer(), *parts, None, scaling=0.5)[0]
        return out

    with sparse_attention(model_of(), 40, np.full(60, 1)):
        assert torch.autograd.gradcheck(attention, (query, keys, values), fast_mode=True)
        (unread,) = torch.autograd.grad(attention(query, keys, values)[0, 99].sum(), keys)
    pages = [bool(unread[:, head, page * 16 : page * 16 + 16].any()) for head in range(KV_HEADS) for page in range(7)]
    assert pages.count(True) == KV_HEADS * 4, "the last position reaches one page besides the reserved three, and no others"


def test_a_window_shorter_than_the_sequence_stays_dense_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERIES", 32)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        sliding_window=40,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    prompt, completion = tokens(60), tokens(60, seed=1)
    tolerance = rounding(model, torch.cat([prompt, completion]))
    with torch.no_grad():
        torch.testing.assert_close(
            logprobs(model, prompt, completion, np.full(59, 1)), logprobs(model, prompt, completion, None), rtol=0, atol=tolerance
        )


def test_the_model_is_as_before_when_the_context_ends() -> None:
    model = model_of()
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="on purpose"), sparse_attention(model, 4, np.zeros(3, dtype=np.int64)):
        raise RuntimeError("on purpose")
    assert model.config._attn_implementation == before != "swarm_sparse"


def test_what_does_not_fit_is_refused() -> None:
    model = model_of()
    with pytest.raises(ValueError, match="5 budgets for a completion of 5 tokens"):
        completion_hidden(model, tokens(4), tokens(5), np.ones(5, int))
    with pytest.raises(ValueError, match="0 prompt"):
        completion_hidden(model, tokens(0), tokens(5))
    with pytest.raises(ValueError, match="budgets of -1 pages"), sparse_attention(model, 4, np.array([-1])):
        pass
    with pytest.raises(ValueError, match="9 tokens, and sparse attention was set up for 4"), sparse_attention(model, 4, np.ones(4, int)):
        model(tokens(9)[None])
    with pytest.raises(ValueError, match="one sequence"), sparse_attention(model, 4, np.ones(4, int)):
        model(tokens(16).view(2, 8))
