"""The training engine on one device: micro-batches, gradients, AdamW on float32 master weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from covary.batch import Algorithm, Batch, Scores
from covary.collate import take_rows
from covary.engines.reader import Reader
from covary.engines.rows import micro_batches, score_rows
from covary.engines.two_pass import two_pass_backward
from covary.scoring import padded, trees
from covary.scoring.score import FlatScores, row_sizes, score_groups
from covary.types import Completion, Group, Score


class LocalEngine:
    """Scores and trains one model in this process.

    Attributes:
        model: the policy, float32; dropout never acts (both sides of every ratio need the same function).
        models: the module behind each model name. `old` is the policy before its first update of a
            rollout: it is scored then, and no copy exists.
        not_packed: why rows are padded instead of packed as trees; None where they are packed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        frozen: Mapping[str, nn.Module] | None = None,
        reader: Reader | None = None,
        reference: str = "old",
        micro_batch_tokens: int = 8192,
        autocast: torch.dtype | None = None,
        logprob_temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        """Take over `model`.

        Args:
            model: a transformers causal language model.
            frozen: other models by name, such as `initial`, where a score reads them. They may have a dtype and a
                device of their own.
            reader: the teacher where it is no such module: it has a tokenizer of its own, or a server runs it.
            reference: what `reference` means: `old` or `initial`.
            micro_batch_tokens: tokens per forward pass (a prompt counts once, or per row where rows are padded); a
                longer row runs alone.
            autocast: dtype of matrix products, or None.
            logprob_temperature: divides the logits of every score.
            gradient_checkpointing: recompute activations layer by layer in the backward pass.
            betas: AdamW's.
            weight_decay: AdamW's, on matrices only.
            max_grad_norm: gradients are scaled down to this norm.
        """
        self.model = model
        self.models: dict[str, nn.Module] = {"policy": model, "old": model}
        for name, module in (frozen or {}).items():
            self.models[name] = module.eval().requires_grad_(False)
        self.reader = reader
        if reference in self.models:
            self.models["reference"] = self.models[reference]
        refused = [
            why for module in {id(m): m for m in self.models.values()}.values() if (why := trees.use_trees(module))
        ]
        self.not_packed = refused[0] if refused else None
        self._layout = padded if refused else trees
        self.micro_batch_tokens = micro_batch_tokens
        self.autocast = autocast
        self.logprob_temperature = logprob_temperature
        self.max_grad_norm = max_grad_norm
        self.gradient_checkpointing = gradient_checkpointing
        model.eval()
        embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        if _is_tied(model) and self.device.type == "cpu" and len(embedding.weight) > micro_batch_tokens:
            # The projection's gradient has a row for every token anyway: the embedding adds those that were read to it,
            # and does not fill a second table with zeros.
            embedding.sparse = True
        if gradient_checkpointing:
            _remove_dropout(model)
            # Its name before transformers 5.24 was another.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})  # pyright: ignore[reportCallIssue]
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        decayed = [p for p in self._parameters.values() if p.ndim >= 2]
        others = [p for p in self._parameters.values() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=0.0,
            betas=betas,
            fused=True,
        )
        self._loss_is_finite = True  # since the last step
        self._of_examples: dict[tuple[str, str], float] = {}  # per="example" scores of models that never change

    @property
    def device(self) -> torch.device:
        """Where the policy lies."""
        return next(self.model.parameters()).device

    # -- scores ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(
        self, groups: list[Group], scores: Sequence[Score], temperature: float | None = None
    ) -> dict[str, list[Tensor | float]]:
        """Per score: one 1-D tensor over each row's tokens (0 where not scored), or one number per row.

        On the CPU, in the row order of `collate`. `temperature` replaces the engine's own.
        """
        temperature = temperature or self.logprob_temperature
        results: dict[str, list[Tensor | float]] = {
            score.name: self._example_scores(groups, score, temperature) for score in scores if score.per == "example"
        }
        per_row = [score for score in scores if score.per == "row"]
        if self.reader is not None:
            asked = [score for score in per_row if score.models == {"teacher"}]
            per_row = [score for score in per_row if score not in asked]
            results |= self.reader(groups, asked) if asked else {}
        return results | (self._row_scores(groups, per_row, temperature) if per_row else {})

    def _row_scores(
        self, groups: list[Group], scores: Sequence[Score], temperature: float
    ) -> dict[str, list[Tensor | float]]:
        def flat(part: list[Group], scores: Sequence[Score]) -> dict[str, FlatScores]:
            return self._flat(part, scores, temperature)

        return score_rows(self._layout, flat, groups, scores, self.micro_batch_tokens)

    def _example_scores(self, groups: list[Group], score: Score, temperature: float) -> list[Tensor | float]:
        """The score of each example's reference answer, for all its rows; NaN where it has none.

        An answer is scored as if it were a completion, and remembered where the score's models never change.
        """
        cache = self._of_examples if self._never_changes(score) else {}
        todo = {
            group.example.id: replace(group, completions=[Completion(group.answer_tokens, "", "eos")], rewards=None)
            for group in groups
            if group.answer_tokens and (score.name, group.example.id) not in cache
        }
        if todo:
            as_row = replace(score, per="row", tokens="sampled")
            values = self._row_scores(list(todo.values()), [as_row], temperature)[score.name]
            cache.update({(score.name, id): float(value) for id, value in zip(todo, values, strict=True)})
        return [cache.get((score.name, group.example.id), float("nan")) for group in groups for _ in group.completions]

    def _never_changes(self, score: Score) -> bool:
        return all(self.models[name] is not self.model for name in score.models)

    def _flat(self, groups: list[Group], scores: Sequence[Score], temperature: float) -> dict[str, FlatScores]:
        with self._autocast():
            return score_groups(self._layout.forward, self.models, groups, scores, temperature)

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext()

    # -- gradients -------------------------------------------------------------------------------------

    def forward_backward(self, groups: list[Group], batch: Batch, algorithm: Algorithm) -> Scores:
        """Accumulate the gradient of the loss over `batch`, whose rows are those of `groups`, in order.

        Returns:
            The detached trained scores on the CPU, (B, T) or (B,). A row whose live score was not finite
            left the loss; its scores are returned as they were, for the caller to count.
        """
        batch = batch.to(self.device)
        live = _Live(self, groups, batch, algorithm)
        if self.gradient_checkpointing:
            self.model.train()  # transformers checkpoints in training mode only; dropout was removed
        for parts in micro_batches(self._layout, row_sizes(groups, algorithm.trained), self.micro_batch_tokens):
            if algorithm.coupled and len(parts) > 1:
                live.two_pass(sorted(i for part in parts for i in part), parts)
            else:
                for rows in parts:
                    live.one_pass(rows)
        self.model.eval()
        return live.seen

    def step(self, lr: float) -> float:
        """Clip, update, clear. A loss or gradient that is not finite skips the update: the gradients are dropped.

        Returns:
            The L2 norm of the gradient before clipping; not finite where the update was skipped.
        """
        norm = float(nn.utils.clip_grad_norm_(self._parameters.values(), self.max_grad_norm))
        if not self._loss_is_finite:
            norm, self._loss_is_finite = float("nan"), True
        if norm < float("inf"):  # False for NaN too
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    # -- state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """`model.<name>` of the model's state, and `optimizer.<parameter>.<exp_avg | exp_avg_sq | step>`.

        Of a model with an adapter the adapter alone: the rest never changes.
        """
        model = self.model.state_dict()
        given = self._given(model)
        state = {f"model.{name}": value for name, value in model.items() if name not in given}
        for name, parameter in self._parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"optimizer.{name}.{key}"] = value
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore weights, buffers and optimizer in place."""
        loaded = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
        self.model.load_state_dict(self._given(self.model.state_dict()) | loaded)
        for name, parameter in self._parameters.items():
            moments = {
                key: state[f"optimizer.{name}.{key}"].clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"optimizer.{name}.{key}" in state
            }
            if moments:
                self.optimizer.state[parameter] = {key: value.to(self.device) for key, value in moments.items()}

    def _given(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of the model's state that an adapter was put on; nothing where there is none."""
        if not hasattr(self.model, "peft_config"):
            return {}
        return {name: value for name, value in model.items() if name not in self._parameters}


class _Live:
    """Live scores of one optimizer batch, micro-batch by micro-batch."""

    def __init__(self, engine: LocalEngine, groups: list[Group], batch: Batch, algorithm: Algorithm) -> None:
        self.engine, self.groups, self.batch, self.algorithm = engine, groups, batch, algorithm
        self.seen: Scores = {}  # detached, whole optimizer batch, on the CPU

    def scores(self, rows: Sequence[int]) -> Scores:
        """Trained scores of some rows, with gradient where it is enabled."""
        width = self.batch.tokens.shape[1]
        flat = self.engine._flat(take_rows(self.groups, rows), self.algorithm.trained, self.engine.logprob_temperature)
        return {
            score.name: flat[score.name].summed(len(rows))
            if score.level == "sequence"
            else flat[score.name].padded(len(rows), width)
            for score in self.algorithm.trained
        }

    def one_pass(self, rows: list[int]) -> None:
        scores = self.scores(rows)
        self._remember(rows, scores)
        finite = _finite_rows(scores)
        if not all(finite):
            # Run again without them: a NaN inside the model would reach shared weights through the
            # backward pass even with zero weight.
            rows = [i for i, ok in zip(rows, finite, strict=True) if ok]
            if not rows:
                return
            scores = self.scores(rows)
        self._backward(rows, scores)

    def _backward(self, rows: list[int], scores: Scores) -> None:
        loss = self.algorithm.loss(scores, self._batch(rows, scores))
        if self._is_finite(loss) and loss.requires_grad:
            loss.backward()

    def _is_finite(self, loss: Tensor) -> bool:
        """A loss may be infinite while its gradient is not: that update is no less broken."""
        finite = bool(loss.isfinite())
        self.engine._loss_is_finite &= finite
        return finite

    def two_pass(self, rows: list[int], parts: list[list[int]]) -> None:
        known = self._known(rows)
        if known is None:
            with torch.no_grad():
                pieces = {i: part for part in parts for i in part}
                by_part = {id(part): self.scores(part) for part in parts}
                known = {
                    name: torch.stack([by_part[id(pieces[i])][name][pieces[i].index(i)] for i in rows])
                    for name in next(iter(by_part.values()))
                }
        self._remember(rows, known)
        finite = _finite_rows(known)
        position = {i: j for j, i in enumerate([i for i, ok in zip(rows, finite, strict=True) if ok])}
        if not position:
            return
        keep = torch.tensor(finite, device=self.engine.device)
        known = {name: value[keep] for name, value in known.items()}
        kept_parts = [[position[i] for i in part if i in position] for part in parts]
        kept = list(position)
        loss = two_pass_backward(
            self.algorithm,
            self._batch(kept, known),
            known,
            lambda part: self.scores([kept[j] for j in part]),
            [part for part in kept_parts if part],
        )
        self._is_finite(loss)

    def _known(self, rows: list[int]) -> Scores | None:
        """Pass-1 scores that the rollout's frozen scores already hold, at the same parameters."""
        twin = {trained: frozen for frozen, trained in self.batch.current.items() if frozen in self.batch}
        if not all(score.name in twin for score in self.algorithm.trained):
            return None
        return {score.name: self.batch[twin[score.name]][rows] for score in self.algorithm.trained}

    def _batch(self, rows: list[int], scores: Scores) -> Batch:
        part = self.batch.take(rows)
        missing = {f: scores[t].detach() for f, t in part.current.items() if f not in part}
        return part.with_numbers(missing)

    def _remember(self, rows: list[int], scores: Scores) -> None:
        for name, value in scores.items():
            if name not in self.seen:
                self.seen[name] = value.new_zeros(len(self.batch), *value.shape[1:], device="cpu")
            self.seen[name][rows] = value.detach().cpu()


def _finite_rows(scores: Scores) -> list[bool]:
    finite = torch.stack([value.detach().isfinite().reshape(len(value), -1).all(-1) for value in scores.values()])
    return finite.all(0).tolist()


def _is_tied(model: nn.Module) -> bool:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    return isinstance(embedding, nn.Embedding) and embedding.weight is getattr(head, "weight", None)


def _remove_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # pyright: ignore[reportArgumentType]
