"""Straggler-aware group control (arXiv 2606.02218): the largest group size whose stragglers stay within a budget.

A bandit with a constraint. Each candidate size G is an arm; an arm's cost p(G) is the probability that a group of G straggles
(`events.straggles`), known through discounted Beta counts; its value is log2 G. A multiplier lambda prices stragglers and
follows the budget delta. Pure arithmetic on completion lengths: no torch, no I/O, microseconds a step.

    choose:  for G within one step of the current index: p ~ Beta(1 + alpha_G, 1 + beta_G);  G = argmax log2 G - lambda p
    observe: S = share of the step's groups that straggled
    update:  all arms: alpha, beta *= gamma;  alpha_G += S, beta_G += 1 - S;  lambda = clip(lambda + eta (S - delta), 0, lambda_max)

That is the paper's controller; the options `retreat`, `counterfactual`, `monotone`, `prompt_aware` and `utility` add to it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from swarm_node.control.arms import UNIFORM, Arms, Beta, mean
from swarm_node.control.counterfactual import subset_straggler_probabilities
from swarm_node.control.decision import ControlStateError, Cost, Decision, Observation
from swarm_node.control.events import straggler_share, straggles
from swarm_node.control.options import SagcOptions
from swarm_node.control.prompt_aware import FeatureTable, feature_priors
from swarm_node.control.steptime import StepTimeModel, rate_utilities

STATE_VERSION = 1
RETREAT_UNTIL = 0.9
"""Share of lambda_max below which a retreat ends. Leaving at once would let lambda bounce at its limit, and every bounce forgets a
straggler that the budget should have paid for."""


class Controller:
    """Chooses G for a step, then learns from the step's lengths. Same seed and same lengths give the same path.

    With a fixed `group_size` it only counts: G never changes and lambda stays at `lambda_0`.
    """

    def __init__(self, options: SagcOptions, seed: int) -> None:
        self.options = options
        self.multiplier = options.lambda_0
        self.step_time = StepTimeModel()
        self._random = random.Random(seed)
        self._sizes = options.sizes
        self._priors = [UNIFORM] * len(self._sizes)
        self._arms = Arms(len(self._sizes))
        self._features = FeatureTable(len(self._sizes), options.gamma)
        self._index = 0
        self._age = options.hold  # steps since G last changed; the first step may change it
        self._steps = 0
        self._retreating = False
        self._pending: list[tuple[str, int]] = []  # feature and index of each group, where groups were decided one by one

    @property
    def posterior(self) -> dict[int, float]:
        """Candidate size -> posterior mean of its straggler probability, over all prompts."""
        return {size: mean(beta) for size, beta in zip(self._sizes, self._posteriors(), strict=True)}

    @property
    def infeasible(self) -> bool:
        """See `Observation.infeasible`."""
        pinned = self._retreating or self.multiplier >= self.options.lambda_max
        return pinned and self.options.group_size is None and mean(self._posteriors()[0]) > self.options.delta

    def _posteriors(self) -> list[Beta]:
        return self._arms.posteriors(self._priors, monotone=self.options.monotone)

    # -- choose -------------------------------------------------------------------------------------------------------------------

    def choose(self, features: Sequence[str] = ()) -> Decision:
        """The group size of the next step, at most one candidate away from the last one.

        Args:
            features: `prompt_aware.prompt_feature` of each group. With `prompt_aware` every feature gets a size of its own, at most one
                candidate away from the feature's last one.
        """
        limit = self.options.lambda_max
        self._retreating = self.options.retreat and self.multiplier >= limit * (RETREAT_UNTIL if self._retreating else 1.0)
        if features and self.options.prompt_aware and self.options.group_size is None:
            return self._choose_each(features)
        self._pending = []
        best, sampled = self._decide(self._posteriors(), self._utilities(), self._index, self._age)
        changed = best != self._index
        self._index, self._age = best, (1 if changed else self._age + 1)
        return Decision(self._sizes[best], self.multiplier, sampled, changed, (self._sizes[best],) * len(features))

    def _choose_each(self, features: Sequence[str]) -> Decision:
        utilities, priors = self._utilities(), feature_priors(self._posteriors())
        chosen: dict[str, int] = {}
        changed = False
        for name in dict.fromkeys(features):
            feature = self._features.get(name, self._steps, start=self._index, age=self.options.hold)
            posteriors = feature.arms.posteriors(priors, monotone=self.options.monotone)
            chosen[name], _ = self._decide(posteriors, utilities, feature.index, feature.age)
            moved = chosen[name] != feature.index
            feature.index, feature.age = chosen[name], (1 if moved else feature.age + 1)
            changed = changed or moved
        self._pending = [(name, chosen[name]) for name in features]
        self._index = sorted(chosen[name] for name in features)[(len(features) - 1) // 2]
        sizes = tuple(self._sizes[index] for _, index in self._pending)
        return Decision(self._sizes[self._index], self.multiplier, {}, changed, sizes)

    def _decide(self, posteriors: Sequence[Beta], utilities: Sequence[float], index: int, age: int) -> tuple[int, dict[int, float]]:
        """The best candidate within reach of `index`, and what was drawn for each candidate there."""
        step = 0 if age < self.options.hold else 1
        reach = range(max(index - step, 0), min(index + step + 1, len(self._sizes)))
        drawn = {i: self._random.betavariate(*posteriors[i]) for i in reach}
        best = reach[0] if self._retreating else max(reach, key=lambda i: utilities[i] - self.multiplier * drawn[i])
        return best, {self._sizes[i]: probability for i, probability in drawn.items()}

    def _utilities(self) -> list[float]:
        if self.options.utility == "rate":
            return rate_utilities(self._sizes, self.step_time.predict(self._sizes))
        return [math.log2(size) for size in self._sizes]

    # -- observe ------------------------------------------------------------------------------------------------------------------

    def observe(self, lengths: Sequence[Sequence[int]], truncated: Sequence[Sequence[bool]] = (), cost: Cost | None = None) -> Observation:
        """Learn from the groups sampled after the last `choose`.

        Args:
            lengths: tokens of each completion, one sequence a group, in the order of `choose`'s features where it got any.
            truncated: whether each completion was cut at the token limit, in the same order; empty: none was.
            cost: what sampling them cost; feeds the step-time model.

        Raises:
            ValueError: no group, an empty group, a length below 1, or another number of groups than was decided.
        """
        events = [straggles(group, self.options.straggler_ratio) for group in lengths]
        blind = sum(all(cut) for cut in truncated)
        censored = sum(any(cut) and not event for cut, event in zip(truncated, events, strict=False))
        if cost is not None:
            self.step_time.observe(lengths, cost)
        smaller = self._counterfactuals(lengths) if self.options.counterfactual else []
        return self._learn(events, smaller, blind, censored)

    def observe_events(self, events: Sequence[bool]) -> Observation:
        """Learn from straggler events alone, one a group: what `observe` does without lengths. Raises ValueError as it does."""
        return self._learn(events, [], 0, 0)

    def _counterfactuals(self, lengths: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each group, the straggler probability of its subsets of each smaller candidate size, ascending."""
        alike: dict[tuple[int, int], list[int]] = {}  # (completions, index) -> groups
        for group, completions in enumerate(lengths):
            index = self._pending[group][1] if self._pending else self._index
            alike.setdefault((len(completions), index), []).append(group)
        found: list[list[float]] = [[] for _ in lengths]
        for (count, index), groups in alike.items():
            sizes = tuple(size for size in self._sizes[:index] if size <= count)
            if sizes:
                rows = subset_straggler_probabilities([lengths[group] for group in groups], sizes, self.options.straggler_ratio)
                for group, row in zip(groups, rows.tolist(), strict=True):
                    found[group] = row
        return found

    def _learn(self, events: Sequence[bool], smaller: Sequence[Sequence[float]], blind: int, censored: int) -> Observation:
        options = self.options
        if not events:
            raise ValueError("a step without groups teaches the controller nothing: observe at least one group")
        if self._pending and len(events) != len(self._pending):
            raise ValueError(f"{len(self._pending)} groups were decided and {len(events)} observed: observe exactly the decided ones")
        share = straggler_share(events, options.event)
        self._arms.discount(options.gamma)
        if self._pending:
            self._learn_each(events, smaller)
        else:
            self._arms.add(self._index, share)
        shares = {}
        for index, size in enumerate(self._sizes):
            probabilities = [row[index] for row in smaller if index < len(row)]
            if probabilities:
                shares[size] = straggler_share(probabilities, options.event)
                self._arms.add(index, shares[size], options.counterfactual * len(probabilities) / len(events))
        if options.group_size is None:
            self.multiplier = min(max(self.multiplier + options.eta * (share - options.delta), 0.0), options.lambda_max)
        self._steps += 1
        return Observation(sum(events), len(events), share, self.multiplier, self.infeasible, blind, censored, shares)

    def _learn_each(self, events: Sequence[bool], smaller: Sequence[Sequence[float]]) -> None:
        """Count each group for its feature, and all of a step's groups together as one for the general experience."""
        for group, ((name, index), event) in enumerate(zip(self._pending, events, strict=True)):
            self._arms.add(index, float(event), 1 / len(events))
            feature = self._features.get(name, self._steps + 1, start=index, age=0)
            feature.arms.add(index, float(event))
            for lower, probability in enumerate(smaller[group] if smaller else ()):
                feature.arms.add(lower, probability, self.options.counterfactual)

    # -- state --------------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that the path from here on depends on, as JSON."""
        version, words, gauss = self._random.getstate()
        return {
            "version": STATE_VERSION,
            "candidates": list(self._sizes),
            "index": self._index,
            "age": self._age,
            "steps": self._steps,
            "multiplier": self.multiplier,
            "retreating": self._retreating,
            "counts": [list(pair) for pair in self._arms.counts],
            "features": self._features.state(),
            "pending": [list(group) for group in self._pending],
            "step_time": self.step_time.state(),
            "random": [version, list(words), gauss],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`.

        Where the candidates changed, those that are still there keep their counts, G becomes the nearest one that is not above the
        saved one, and features start anew.

        Raises:
            ControlStateError: another version, or not a controller's state. The controller is then as it was.
        """
        if state.get("version") != STATE_VERSION:
            raise ControlStateError(f"controller state has version {state.get('version')}, this build reads {STATE_VERSION}")
        fresh = Controller(self.options, 0)
        try:
            fresh._read(state)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ControlStateError(f"not a controller state: {error!r}") from error
        self.__dict__.update(fresh.__dict__)

    def _read(self, state: Mapping[str, Any]) -> None:
        saved = [int(size) for size in state["candidates"]]
        counts = {size: [float(alpha), float(beta)] for size, (alpha, beta) in zip(saved, state["counts"], strict=True)}
        self._arms.counts = [counts.get(size, [0.0, 0.0]) for size in self._sizes]
        self._index = max((i for i, size in enumerate(self._sizes) if size <= saved[state["index"]]), default=0)
        self._age, self._steps = int(state["age"]), int(state["steps"])
        self.multiplier = min(max(float(state["multiplier"]), 0.0), self.options.lambda_max)
        self._retreating = bool(state["retreating"])
        if tuple(saved) == self._sizes:
            self._features.restore(state["features"])
            self._pending = [(str(name), int(index)) for name, index in state["pending"]]
        self.step_time.restore(state["step_time"])
        version, words, gauss = state["random"]
        self._random.setstate((version, tuple(words), gauss))
