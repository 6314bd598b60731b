"""vLLM as a rollout engine: dense, fed with the policy's weights after every update.

vLLM runs inside this process, so its worker can copy from the policy's own tensors: no file, no socket, nothing is serialised. It is
optional and brings its own versions of torch and transformers: see docs/vllm.md.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_protocols.group import Completion, Finish

from swarm_node.policy.logprobs import completion_logprobs
from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import Engine, GroupRequest, Rollout, RolloutReport, by_group, completion_streams, straggler_seconds
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.vllm.start import VllmError, cannot_run, check_device, import_vllm, plan_cache, sleeps, start_vllm
from swarm_node.rollout.vllm.weights import merged_weights

_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}
_FAR = 0.5
"""Mean difference, in nats, between vLLM's log-probs and the policy's own from which on they are not of one model. Rounding in bfloat16
makes some hundredths."""


class StaleWeights(RuntimeError):
    """vLLM holds weights of another policy step than the one that is to be sampled: nothing was sampled."""


class VllmEngine(Engine):
    """Samples whole groups with vLLM. It is always dense; `GroupRequest.budgets` and `.observe` are not followed."""

    name = "vllm"

    def __init__(self, policy: Policy, options: RolloutOptions) -> None:
        """Starts vLLM with the policy's architecture; its weights are handed over by the first `generate`.

        Raises:
            VllmError: vLLM is not installed or broken, computes elsewhere than the policy, or cannot run this model.
        """
        vllm = import_vllm()
        check_device(vllm, policy.device)
        super().__init__(policy, options)
        self._step = 0
        self._names = itertools.count()
        self._sleeps = sleeps(vllm)
        self._asleep = False
        self._proven = False
        plan = plan_cache(policy, options, returned=self._sleeps)
        self._context = plan.context
        self._llm = start_vllm(vllm, policy, options, plan)
        self._sampling_params = vllm.SamplingParams
        self._final_only = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        cache = f"{plan.size / 2**20:,.0f} MiB of cache"
        kept = "given back while learning" if self._sleeps else "kept while learning, as is its copy of the weights"
        self.choices = (f"engine vllm: vLLM {vllm.__version__}, dense, up to {plan.context:,} tokens a sequence; {cache}, {kept}",)

    def policy_updated(self, step: int) -> None:
        """The next `generate` hands over the weights of `step` before it samples."""
        self._step = step
        self._llm.collective_rpc("forget_policy_weights")

    def _generate(self, requests: Sequence[GroupRequest], seed: int, temperature: float, max_new_tokens: int, dense: bool) -> Rollout:
        """The report's `decode_steps` are vLLM's steps, in which prompts are computed too: it tells no time for prompts (`prefill_seconds`
        is 0) and no preemptions (0). `slot_idle_share` counts the slots that the unfinished completions cannot fill, and does not see those
        that wait for cache.

        Raises:
            VllmError: vLLM computes another model than the policy is; found at the first call.
            StaleWeights: vLLM's worker does not hold the weights of the policy's step.
        """
        started = time.perf_counter()
        self._wake()
        if self._held_step() != self._step:
            self._hand_over()
        if self._held_step() != self._step:
            raise StaleWeights(
                f"vLLM holds the weights of policy step {self._held_step()}, and step {self._step} is to be sampled: "
                "this is a defect of the engine, not of the configuration"
            )
        if not self._proven:
            self._prove()
        work = self._sample(requests, seed, temperature, max_new_tokens)
        self._sleep()
        completions = [completion for _, completion in sorted(work.completions.items())]
        report = RolloutReport(
            tokens=sum(map(len, completions)),
            seconds=time.perf_counter() - started,
            slot_idle_share=work.idle / (min(self._options.max_batch, len(completions)) * work.steps),
            straggler_seconds=straggler_seconds(requests, [end for _, end in sorted(work.ends.items())]),
            prefill_tokens=work.prompt_tokens,
            decode_steps=work.steps,
        )
        return Rollout(by_group(requests, completions), report)

    def _held_step(self) -> int | None:
        """The policy step whose weights the worker says it has."""
        (step,) = self._llm.collective_rpc("held_policy_step")
        assert step is None or isinstance(step, int)
        return step

    def _hand_over(self) -> None:
        """Copy the policy's weights, adapters merged, and forget every key and value of the old ones."""
        (missing,) = self._llm.collective_rpc("take_policy_weights", args=(self._step, merged_weights(self._policy.model)))
        if missing:
            raise VllmError(
                f"{len(missing)} of vLLM's parameters, first {missing[0]}, have no counterpart in {self._policy.name}: its architecture's "
                "weights have other names there. Use rollout.engine = 'sparse' or 'reference'."
            )
        if not self._llm.reset_prefix_cache():
            raise StaleWeights("vLLM did not forget the keys and values of the old weights: a request is still running in it")

    def _prove(self) -> None:
        """vLLM has code of its own for every architecture, and packs weights: compare a few log-probs with the policy's own, once."""
        request = GroupRequest(np.arange(16, dtype=np.int32) % self._policy.vocab_size, size=4, key=0)
        try:
            sampled = list(self._sample([request], seed=0, temperature=1.0, max_new_tokens=8).completions.values())
        except RuntimeError as error:  # some limits of its kernels show in the first step only
            raise cannot_run(self._policy, error) from error
        with torch.inference_mode():
            prompt = torch.from_numpy(request.prompt)
            own = completion_logprobs(self._policy.model, [(prompt, torch.from_numpy(completion.tokens)) for completion in sampled])
        difference = np.abs(torch.cat(own).cpu().numpy() - np.concatenate([completion.logprobs for completion in sampled])).mean()
        if not difference <= _FAR:
            raise VllmError(
                f"vLLM computes another model than {self._policy.name}: their log-probs differ by {difference:.2f} nats on average, "
                f"{_FAR} at most are a matter of rounding. Use rollout.engine = 'sparse' or 'reference'."
            )
        self._proven = True

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _sleep(self) -> None:
        """Give weights and cache back while the learner needs the memory; the weights come again with the next rollout."""
        if self._sleeps:
            self._llm.sleep(level=2)
            self._llm.collective_rpc("forget_policy_weights")
            self._asleep = True

    def _sample(self, requests: Sequence[GroupRequest], seed: int, temperature: float, max_new_tokens: int) -> _Work:
        """One request a completion, so that each has a seed of its own; vLLM shares whole pages of equal prompts."""
        engine = self._llm.llm_engine
        work = _Work()
        waiting: dict[str, int] = {}
        added: list[str] = []
        try:
            prompts = [prompt for request in requests for prompt in [{"prompt_token_ids": request.prompt.tolist()}] * request.size]
            for owner, (prompt, own_seed) in enumerate(zip(prompts, completion_seeds(requests, seed).tolist(), strict=True)):
                name = str(next(self._names))
                waiting[name] = owner
                added.append(engine.add_request(name, prompt, self._params(own_seed, temperature, max_new_tokens)))
            slots = min(self._options.max_batch, len(waiting))
            while waiting:
                work.idle += slots - min(slots, len(waiting))
                work.steps += 1
                for output in engine.step():
                    owner = waiting.pop(output.request_id)
                    work.completions[owner] = _completion(output.outputs[0])
                    work.ends[owner] = time.perf_counter()
                    work.prompt_tokens += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
        finally:
            if waiting:  # interrupted: the next call must not meet what is left of this one
                engine.abort_request(added, internal=True)
        return work

    def _params(self, seed: int, temperature: float, max_new_tokens: int) -> Any:
        """The whole vocabulary, the policy's stop tokens instead of vLLM's, the drawn token's log-prob, ids only."""
        return self._sampling_params(
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=seed,
            max_tokens=max_new_tokens,
            ignore_eos=True,
            stop_token_ids=sorted(self._policy.stop_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._final_only,
        )


class _Work:
    """What a call has sampled; completions and the times of their ends by their place in the order of the requests and members."""

    def __init__(self) -> None:
        self.completions: dict[int, Completion] = {}
        self.ends: dict[int, float] = {}
        self.steps = 0
        self.idle = 0
        """Slot-steps without a completion that could fill the slot."""
        self.prompt_tokens = 0


def completion_seeds(requests: Sequence[GroupRequest], seed: int) -> NDArray[np.int64]:
    """The seed in [0, 2^63) of each of N completions, (N,): a hash of the seed, the group's key and the completion's index."""
    return (completion_streams(requests, seed) >> np.uint64(1)).astype(np.int64)


def _completion(output: Any) -> Completion:
    """From vLLM's final output of one request."""
    tokens = np.array(output.token_ids, dtype=np.int32)
    logprobs = np.array(output.logprobs.logprobs, dtype=np.float32)
    if output.finish_reason not in _FINISHES or output.logprobs.token_ids != tokens.tolist():
        raise RuntimeError(
            f"vLLM ended a completion as {output.finish_reason!r}, with {len(tokens)} tokens and {len(logprobs)} log-probs: "
            "use the version of vLLM that docs/vllm.md names"
        )
    if not np.isfinite(logprobs).all():
        raise FloatingPointError(
            "the model's logits are not finite: its weights have diverged. Resume from an earlier checkpoint with a lower learning rate."
        )
    return Completion(tokens, logprobs, _FINISHES[output.finish_reason])
