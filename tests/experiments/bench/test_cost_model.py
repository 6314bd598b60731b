"""The eFLOPs model against numbers worked by hand."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, Qwen3Config

from swarm_node.experiments.bench.cost_model import ModelShape, Speed, Work, decode_seconds, shape_of, step_work

# 3 layers, 4 query heads on 2 KV heads of 8; 1,000 parameters in bf16.
SMALL = ModelShape(layers=3, heads=4, kv_heads=2, head_size=8, parameters=1000)


def test_a_dense_step_reads_the_weights_once_and_every_cache_entirely() -> None:
    # Attention of one layer and sequence: 4·4·8·320 = 40,960 FLOPs; 2·320·2·8 numbers of 2 bytes = 20,480 bytes.
    assert step_work(SMALL, 1, 320) == Work(2 * 1000 + 3 * 40_960, 1000 * 2 + 3 * 20_480)
    assert step_work(SMALL, 5, 320) == Work(5 * (2 * 1000 + 3 * 40_960), 1000 * 2 + 5 * 3 * 20_480)


def test_a_sparse_step_keeps_two_layers_dense_and_scores_every_page_in_the_others() -> None:
    # Budget 2 and the reserved three: 5 pages of 16 tokens, 10,240 FLOPs and 5,120 bytes in the one sparse layer.
    # Scoring 20 pages: 2·2·8·20 = 640 FLOPs and 20·2·8·2 = 640 bytes.
    sparse = Work(10_240 + 640, 5_120 + 640)
    assert step_work(SMALL, 1, 320, budget=2) == Work(2000 + 2 * 40_960 + sparse.flops, 2000 + 2 * 20_480 + sparse.bytes)


def test_a_context_within_the_budget_is_dense() -> None:
    assert step_work(SMALL, 4, 320, budget=17) == step_work(SMALL, 4, 320)
    assert step_work(SMALL, 4, 321, budget=17) != step_work(SMALL, 4, 321)


def test_eflops_weigh_bytes_by_the_intensity_of_the_machine() -> None:
    speed = Speed(flops_per_second=1000.0, bytes_per_second=100.0, step_seconds=0.5)
    assert speed.intensity == 10.0
    assert Work(300.0, 40.0).eflops(speed.intensity) == 700.0
    assert Work(300.0, 40.0).seconds(speed) == pytest.approx(0.3 + 0.4 + 0.5)


def test_a_fixed_overhead_lowers_the_gain_of_sparsity() -> None:
    free, busy = Speed(1e12, 37e9), Speed(1e12, 37e9, step_seconds=0.02)
    shape = ModelShape(layers=30, heads=9, kv_heads=3, head_size=64, parameters=134_515_008)
    gains = [decode_seconds(shape, speed, 8, 8192) / decode_seconds(shape, speed, 8, 8192, 93) for speed in (busy, free)]
    assert 1 < gains[0] < gains[1]
    assert decode_seconds(shape, busy, 8, 8192) == pytest.approx(decode_seconds(shape, free, 8, 8192) + 0.02)


def test_where_only_bytes_cost_the_ratio_is_that_of_the_bytes() -> None:
    # SmolLM2-135M, batch 8, 4,096 tokens: 2·4096·192·2 bytes a layer dense; 96 pages of 256 sparse, and 256 centroids.
    shape = ModelShape(layers=30, heads=9, kv_heads=3, head_size=64, parameters=134_515_008)
    weights, dense = 134_515_008 * 2, 2 * 4096 * 192 * 2
    sparse = 2 * 1536 * 192 * 2 + 256 * 192 * 2
    expected = (weights + 8 * 30 * dense) / (weights + 8 * (2 * dense + 28 * sparse))
    dense_step, sparse_step = (decode_seconds(shape, Speed(1e30, 37e9), 8, 4096, budget) for budget in (None, 93))
    assert dense_step / sparse_step == pytest.approx(expected)
    assert expected == pytest.approx(1024.0 / 605.6, abs=1e-3)  # megabytes


def test_the_shape_of_a_model_comes_from_its_configuration() -> None:
    tied = LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True
    )
    assert shape_of(tied, 134_515_008) == ModelShape(30, 9, 3, 64, 134_515_008)
    apart = Qwen3Config(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=1000,
        tie_word_embeddings=False,
    )  # fmt: skip
    assert shape_of(apart, 5_000_000, weight_bytes=4) == ModelShape(28, 16, 8, 128, 5_000_000 - 1_024_000, weight_bytes=4)


def test_no_speed_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="measure"):
        Speed(0.0, 1e9)
