"""DistillSparse (arXiv 2606.08446): train the rollout's adapter so that the sparse actor says what the dense policy would say.

On a few completions of the step the policy runs twice: densely without the adapter, which is the teacher, and with sparse attention and
the adapter, which is the student. The loss is the divergence between their distributions over the whole vocabulary. Only the adapter
moves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swarm_node.learning.optimiser import Optimiser
from swarm_node.learning.options import Direction, DistillOptions, LearningOptions
from swarm_node.policy.parts import evaluating, head
from swarm_node.policy.rollout_adapter import RolloutAdapter
from swarm_node.policy.sparse_attention import completion_hidden, sparse_positions

Budgets = Callable[[NDArray[np.int64]], NDArray[np.int32]]
"""Pages besides the reserved three by position, as `Schedule.budgets_at` of the rollout gives them."""


@dataclass(frozen=True, eq=False)
class DistillReport:
    """What one update of the adapter did."""

    step: int
    """Updates that the adapter has had, over its whole life."""
    completions: int = 0
    """Completions learned from."""
    tokens: int = 0
    loss: float = float("nan")
    """Mean divergence of a token before the update, in nats, times the coefficient."""
    grad_norm: float = float("nan")
    """Before clipping."""
    acceptance: tuple[tuple[NDArray[np.int64], NDArray[np.float32]], ...] = ()
    """Of the sparse actor with the adapter as it was before the update: for each completion the positions (n,) that were decoded and the
    acceptance (n,) there, exact over the vocabulary. What a closed loop over the schedule wants to see."""
    skipped: str = ""
    """Why the adapter was not updated, in words; empty when it was."""
    seconds: float = 0.0

    @property
    def acceptance_mean(self) -> float:
        """Over all tokens of all completions; NaN where there was none."""
        values = np.concatenate([values for _, values in self.acceptance]) if self.acceptance else np.empty(0)
        return float(values.mean()) if len(values) else float("nan")


class Distiller:
    """Trains a rollout adapter. Deterministic to the bit on one thread."""

    def __init__(self, model: nn.Module, adapter: RolloutAdapter, options: DistillOptions, seed: int = 0) -> None:
        """
        Args:
            model: The policy's model, which the adapter was made for.
            adapter: What is trained; the model's own weights are not.
            options: `[distill]`.
            seed: Of the choice of completions.
        """
        self.adapter = adapter
        self.steps = 0
        """Updates taken."""
        self._model = model
        self._options = options
        self._seed = seed
        self._optimiser = Optimiser(adapter.parameters(), LearningOptions(grad_clip=options.grad_clip))

    def step(self, samples: Sequence[tuple[Tensor, Tensor]], budgets: Budgets, temperature: float) -> DistillReport:
        """Update the adapter once, from completions that the sparse actor sampled (or others: then its states are others).

        Args:
            samples: Pairs (prompt (P,), completion (T,)) of integer token ids. Those that the budgets never make sparse are left out: on
                them there is next to nothing to learn.
            budgets: Of the rollout that comes next.
            temperature: Of the rollout.
        """
        started = time.perf_counter()
        chosen = self._choose(samples, budgets)
        if not chosen:
            return DistillReport(self.steps, skipped=f"none of {len(samples)} completions is longer than the pages that its budget allows")
        tokens = sum(len(completion) for _, completion in chosen)
        total, acceptance = 0.0, []
        self._optimiser.clear()
        with _only_the_adapter_learns(self._model):
            for prompt, completion in chosen:
                loss, accepted = self._accumulate(prompt, completion, budgets, temperature, tokens)
                total += loss
                acceptance.append((_decoded(prompt, completion), accepted[1:]))
        norm = self._optimiser.step(self._options.learning_rate)
        finite = math.isfinite(norm)
        self.steps += finite
        return DistillReport(
            step=self.steps,
            completions=len(chosen),
            tokens=tokens,
            loss=total,
            grad_norm=norm,
            acceptance=tuple(acceptance),
            skipped="" if finite else f"the gradient's norm is {norm}",
            seconds=time.perf_counter() - started,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Adapter, moments and step count as tensors on the CPU."""
        tensors = {"steps": torch.tensor(self.steps)}
        tensors |= {f"adapter.{name}": tensor for name, tensor in self.adapter.state_dict().items()}
        return tensors | {f"optimiser.{name}": tensor for name, tensor in self._optimiser.state_dict().items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue where `state_dict` was taken, to the bit.

        Raises:
            ValueError: the state is of another model or rank, or not a state of this kind.
        """
        parts: dict[str, dict[str, Tensor]] = {"adapter": {}, "optimiser": {}}
        steps = tensors.get("steps")
        for full_name, tensor in tensors.items():
            part, _, name = full_name.partition(".")
            if full_name != "steps" and part not in parts:
                raise ValueError(f"the state of the rollout adapter holds {full_name!r}, which is neither its own nor its optimiser's")
            if name:
                parts[part][name] = tensor
        if steps is None:
            raise ValueError("the state of the rollout adapter holds no 'steps': it is not a state that distillation saved")
        self.adapter.load_state_dict(parts["adapter"])
        self._optimiser.load_state_dict(parts["optimiser"])
        self.steps = int(steps)

    def _choose(self, samples: Sequence[tuple[Tensor, Tensor]], budgets: Budgets) -> list[tuple[Tensor, Tensor]]:
        """The step's draw among the completions that are sparse anywhere, in their order."""
        able = [
            (prompt, completion)
            for prompt, completion in samples
            if sparse_positions(len(prompt), budgets(_decoded(prompt, completion))).any()
        ]
        noise = np.random.default_rng((self._seed, self.steps))
        drawn = noise.permutation(len(able))[: self._options.completions_per_step]
        return [able[index] for index in sorted(drawn)]

    def _accumulate(
        self, prompt: Tensor, completion: Tensor, budgets: Budgets, temperature: float, tokens: int
    ) -> tuple[float, NDArray[np.float32]]:
        """Add one completion's part of the gradient. Returns its part of the loss, and its tokens' acceptance (T,)."""
        with torch.no_grad():
            dense = completion_hidden(self._model, prompt, completion)
        with self.adapter.active():
            sparse = completion_hidden(self._model, prompt, completion, budgets(_decoded(prompt, completion)))
        divergences, accepted = token_divergences(head(self._model), dense, sparse, self._options.direction, temperature)
        loss = divergences.sum() * (self._options.coefficient / tokens)
        loss.backward()
        return float(loss.detach()), accepted.cpu().numpy()


def _decoded(prompt: Tensor, completion: Tensor) -> NDArray[np.int64]:
    """Positions (T - 1,) of the completion's tokens that are read back: the last one never is."""
    return np.arange(len(prompt), len(prompt) + len(completion) - 1)


@contextmanager
def _only_the_adapter_learns(model: nn.Module) -> Iterator[None]:
    """The policy in evaluation mode and without gradients of its own; as it was when the context ends."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        with evaluating(model):
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def divergence(dense_logits: Tensor, sparse_logits: Tensor, direction: Direction, temperature: float = 1.0) -> Tensor:
    """Kullback-Leibler divergence of each token between softmax(logits / temperature) of both sides, in nats.

    With respect to the sparse logits the gradient of `forward`, KL(dense || sparse), is (p_sparse - p_dense) / temperature. The k3 estimate
    on tokens sampled from the sparse side has that gradient in expectation, and noise besides.

    dense_logits, sparse_logits: (T, V), of any floating type. Returns (T,) float32; gradients reach the sparse logits only.
    """
    dense, sparse = _both(dense_logits, sparse_logits, temperature)
    first, second = (dense, sparse) if direction == "forward" else (sparse, dense)
    return (first.exp() * (first - second)).sum(-1)


def token_divergences(
    project: Callable[[Tensor], Tensor],
    dense_hidden: Tensor,
    sparse_hidden: Tensor,
    direction: Direction,
    temperature: float = 1.0,
    chunk_tokens: int = 128,
) -> tuple[Tensor, Tensor]:
    """`divergence` and acceptance from hidden states, with logits of `chunk_tokens` positions at a time in both passes.

    Args:
        project: The LM head, (n, H) -> (n, V).
        dense_hidden: (T, H), T >= 1.
        sparse_hidden: (T, H).
        direction: See `divergence`.
        temperature: Of the sampling; divides the logits.
        chunk_tokens: Positions whose logits are held at once.

    Returns:
        Divergences (T,) float32, differentiable in `sparse_hidden`, and acceptances (T,) float32 without gradient: the sum of
        min(p_dense, p_sparse) over the vocabulary.
    """

    def chunk(dense_states: Tensor, sparse_states: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            dense_logits = project(dense_states)
        sparse_logits = project(sparse_states)
        with torch.no_grad():
            dense, sparse = _both(dense_logits, sparse_logits, temperature)
            accepted = torch.minimum(dense, sparse).exp_().sum(-1)
            del dense, sparse
        return divergence(dense_logits, sparse_logits, direction, temperature), accepted

    parts = []
    for states in zip(dense_hidden.detach().split(chunk_tokens), sparse_hidden.split(chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(chunk, *states, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(chunk(*states))
    divergences, acceptances = zip(*parts, strict=True)
    return torch.cat(divergences), torch.cat(acceptances)


def _both(dense_logits: Tensor, sparse_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of both sides."""
    dense = (dense_logits.detach().float() / temperature).log_softmax(-1)
    return dense, (sparse_logits.float() / temperature).log_softmax(-1)
