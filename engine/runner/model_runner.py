"""Runs batch plans on the model; owns the KV cache and all per-slot state."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch.batch import BatchPlan, BatchResult
from engine.distributed.group import Transfer
from engine.grammar.masks import Ends, GrammarTable, PendingMasks
from engine.kernels.processor import kernels_are_faster
from engine.models.adapters import AdapterRows, AdapterWeights
from engine.models.attention.rows import AttentionRows
from engine.models.decoder import Decoder
from engine.models.device_copies import to_device
from engine.models.heads.head import DraftHead
from engine.models.step import NO_TAPS, ImageTokens
from engine.models.vision.loading import VisionEncoder
from engine.runner.compiled_draws import drawing_for
from engine.runner.cuda_graphs import DecodeGraphs, recordable_attention
from engine.runner.draft_head import HeadDrafts
from engine.runner.draft_model import DraftModel
from engine.runner.filters import WITH_TORCH, Drawing
from engine.runner.head_threads import head_threads
from engine.runner.image_embeddings import ImageEmbeddings
from engine.runner.inputs import (
    BatchRows,
    Draws,
    attention_rows,
    batch_rows,
    draws_of,
    step_tokens,
    write_proposed,
)
from engine.runner.kv_memory import allocate_cache, as_bytes, read_block, write_block
from engine.runner.logprobs import token_logprobs
from engine.runner.pooler import Pooler
from engine.runner.sampler import Sampled, sample
from engine.runner.slots import NO_LOGPROBS, SlotTable
from engine.shared.messages import PoolingParams, TokenLogprob

_PROMPT_LOGPROB_ROWS = 256
"""Maximum prompt positions whose full logits are held at once."""


class EarlierStages(Protocol):
    """The processes that have the layers before this process's."""

    def begin(self, rows: BatchRows, shape: AttentionRows, images: ImageTokens | None) -> Transfer:
        """Start computing these tokens there, after all steps started before."""

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Load their part of an adapter into a slot, after all steps started before."""


class StartedStep(NamedTuple):
    """A step whose inputs have been gathered, and which earlier stages already compute."""

    plan: BatchPlan
    rows: BatchRows
    shape: AttentionRows
    draws: Draws
    adapters: AdapterRows | None
    new_adapters: dict[int, AdapterWeights]
    """Adapters to load into slots before the step is computed: earlier steps need the old ones."""
    incoming: Transfer | None
    """States to be received from the previous pipeline stage."""
    images: ImageTokens | None = None


class ModelRunner:
    """Runs the plans of one engine, in order, on one model replica.

    With pipeline stages, several steps can be in flight: each begins once all of its tokens are
    sampled, and finishes after the one before.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_kv_blocks: int,
        block_size: int,
        grammars: GrammarTable | None = None,
        enforce_eager: bool = False,
        max_head_threads: int = 1,
        pooler: Pooler | None = None,
        adapters: Mapping[str, AdapterWeights] | None = None,
        earlier: EarlierStages | None = None,
        draft: Decoder | DraftHead | None = None,
        vision: VisionEncoder | None = None,
    ) -> None:
        """Allocate the KV cache. Unless `enforce_eager`, record CUDA decode steps as graphs, and
        sample with kernels on a CPU.

        `max_head_threads` is the number of threads for the LM head of a large batch, if more than
        the layers have. A `pooler` computes vectors of sequences instead of tokens. `adapters` are
        those that plans can refer to, by version. `draft` fills in plans' draft tokens. `vision`
        encodes the images of plans.
        """
        self.model = model
        self._images = None if vision is None else ImageEmbeddings(vision, model)
        self._pooler = pooler
        self._params: dict[int, PoolingParams] = {}
        self._max_head_threads = max_head_threads
        self._grammars = grammars
        self._adapters = {} if adapters is None else adapters
        self._new_adapters: dict[int, AdapterWeights] = {}
        """Adapters to load into slots with the next step."""
        self._earlier = earlier
        on_cuda = model.device.type == "cuda"
        # Padding of recorded steps gets a dedicated block after those of sequences.
        self._cache = allocate_cache(
            model.spec, num_kv_blocks + on_cuda, block_size, model.kv_format, model.device
        )
        self._blocks = [] if on_cuda else as_bytes(self._cache)
        """The cache as bytes, if the CPU can access it."""
        self._table = SlotTable(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            vocab_size=model.spec.vocab_size,
            eos_token_ids=model.spec.eos_token_ids,
            num_groups=len(model.spec.cache_groups.windows),
        )
        is_stock = enforce_eager or not kernels_are_faster(model.device)
        draws_plainly = is_stock or pooler is not None  # a pooling model samples nothing

        def sampler_of(each: Decoder) -> Drawing:
            return WITH_TORCH if draws_plainly else drawing_for(each.dtype, each.device)

        self._drawing = sampler_of(model)
        self._draft: DraftModel | None = None
        self._head: HeadDrafts | None = None
        if isinstance(draft, DraftHead):
            self._head = HeadDrafts(draft, self._table, num_kv_blocks, sampler_of(draft.block))
        elif draft is not None:
            self._draft = DraftModel(draft, self._table, num_kv_blocks, sampler_of(draft))
        self._graphs: DecodeGraphs | None = None
        # A draft head needs states that recorded steps do not return.
        records = not enforce_eager and self._head is None
        attention = recordable_attention(model, block_size) if on_cuda and records else None
        if attention is not None:
            self._graphs = DecodeGraphs(
                model,
                attention,
                self._cache,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                scratch_block=num_kv_blocks,
            )

    def run(self, plan: BatchPlan) -> BatchResult:
        """Compute the plan's rows, sample tokens and append them to their slots.

        Raises:
            ValueError: a starting sequence does not fit the model.
        """
        return self.finish(self.begin(plan))

    @torch.inference_mode()
    def begin(self, plan: BatchPlan) -> StartedStep | None:
        """Apply the plan's changes and start its rows on earlier stages; return None without rows.

        All of the rows' tokens have to be sampled already. Another thread may finish steps
        meanwhile, if these have rows of other slots or sample no tokens.

        Raises:
            ValueError: a starting sequence does not fit the model.
        """
        plan = self._update(plan)
        if not plan.slots:
            return None
        rows = batch_rows(plan, self._table)
        shape = attention_rows(rows, self._table)
        new_adapters, self._new_adapters = self._new_adapters, {}
        images = None
        if self._images is not None:
            rows, images = self._images.place(rows), self._images.of_step(rows, self._table)
        incoming = None
        if self._earlier is not None:
            for adapter_slot, weights in new_adapters.items():
                self._earlier.load_adapter(adapter_slot, weights)
            incoming = self._earlier.begin(rows, shape, images)
        bank = self.model.adapters
        adapters = None if bank is None else bank.rows(rows.adapters)
        draws = draws_of(plan, rows)
        return StartedStep(plan, rows, shape, draws, adapters, new_adapters, incoming, images)

    @torch.inference_mode()
    def finish(self, started: StartedStep | None) -> BatchResult:
        """Compute the rest of the step that was begun after the last finished one."""
        if started is None:
            self.model.dummy_step()
            return BatchResult(token_ids=[])
        result = self._finish(started)
        if self._head is not None:
            self._head.observe(started.plan, started.rows, result.accepted)
        return result

    def _finish(self, started: StartedStep) -> BatchResult:
        plan, rows, draws, grammars = started.plan, started.rows, started.draws, self._grammars
        if self._pooler is not None:
            return self._pooled(self._pooler, started)
        if grammars is not None:
            for start in plan.starting:
                grammars.start(start)
        # Masks are computed while the states are: an accelerator gets its work first.
        on_cpu = self.model.device.type == "cpu"
        pending = self._begin_masks(started) if on_cpu else None
        hidden, prompt_logprobs = self._states(started)
        if not len(rows.samples):
            return BatchResult(token_ids=[], prompt_logprobs=prompt_logprobs)
        if not on_cpu:
            pending = self._begin_masks(started)
        with head_threads(self._max_head_threads, hidden.numel() * self.model.spec.vocab_size):
            logits = self.model.logits(hidden, self._head_adapters(started.adapters, draws.tokens))
            masks = None
            if grammars is not None and pending is not None:
                masks = grammars.finish(pending)
            sampled = sample(
                logits, self._table, draws.slots, draws.positions, masks, drawing=self._drawing
            )
        self._table.token_ids[draws.slots, draws.positions] = sampled.token_ids
        if plan.proposed:
            return _verified(plan, draws, sampled, prompt_logprobs, grammars)
        token_ids, ends = sampled.token_ids.tolist(), Ends({}, {}, {})
        if grammars is not None:
            ends = grammars.advance(draws.slots.tolist(), token_ids)
        return BatchResult(
            token_ids=token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar_ends=ends.reasons,
            grammar_stalls=ends.stalls,
            mask_us={} if grammars is None else grammars.mask_us,
            mask_wait_us=0 if grammars is None else grammars.waited_us,
        )

    def _begin_masks(self, started: StartedStep) -> PendingMasks | None:
        if self._grammars is None:
            return None
        plan = started.plan
        proposed = {plan.slots[row]: tokens for row, tokens in plan.proposed.items()}
        return self._grammars.begin(started.draws.slots.tolist(), proposed)

    def _pooled(self, pooler: Pooler, started: StartedStep) -> BatchResult:
        """Return a vector for each sequence whose last token is computed in this step."""
        plan, rows = started.plan, started.rows
        self._params |= {each.slot: each.pooling or PoolingParams() for each in plan.starting}
        ended = rows.samples
        if not pooler.spec.in_one_step:  # only the last state is needed
            hidden, _ = self._states(started)
            token_ids = np.zeros(len(ended), np.int64)  # used only for per-token vectors
            firsts, counts = np.arange(len(ended)), np.ones(len(ended), np.int64)
        else:
            hidden = self._compute(started, None)
            token_ids, firsts, counts = rows.token_ids, rows.first_token, rows.counts
        if not len(ended):
            return BatchResult([])
        params = [self._params[plan.slots[row]] for row in ended.tolist()]
        vectors = pooler.vectors(hidden, token_ids, firsts, counts, params)
        return BatchResult([], pooled=dict(zip(ended.tolist(), vectors, strict=True)))

    @torch.inference_mode()
    def hidden_states(self, plan: BatchPlan) -> Tensor:
        """Compute a step without sampling; return the final states [tokens, hidden]."""
        started = self.begin(plan)
        assert started is not None, "a plan without rows"
        return self._compute(started, None)

    def _head_adapters(
        self, adapters: AdapterRows | None, tokens: npt.NDArray[np.int64]
    ) -> AdapterRows | None:
        """Return the adapters of some of a step's tokens, if logits depend on them."""
        bank = self.model.adapters
        if adapters is None or bank is None or bank.head is None or not bank.head.used:
            return None
        return adapters.select(self._tensor(tokens))

    def _update(self, plan: BatchPlan) -> BatchPlan:
        """Apply the changes of a plan; return it with all draft tokens filled in."""
        for adapter_slot, version in plan.adapters.items():
            self._new_adapters[adapter_slot] = self._adapters[version]
        for start in plan.starting:
            self._table.start(start)
        for blocks in plan.blocks:
            self._table.append_blocks(blocks)
        if self._images is not None:
            self._images.update(plan)
        if self._head is not None:
            return self._head.propose(plan)
        if self._draft is not None:
            return self._draft.propose(plan)
        write_proposed(plan, self._table)
        return plan

    def _states(self, started: StartedStep) -> tuple[Tensor, dict[int, list[TokenLogprob]]]:
        """Return the final states [draws, hidden], and log probabilities of prompt tokens by
        row."""
        rows, draws = started.rows, started.draws
        reporting = np.flatnonzero(self._table.sampling.prompt_logprobs[rows.slots] != NO_LOGPROBS)
        others = len(draws.tokens) < len(rows.token_ids)
        only_draws = others and not len(reporting) and self.model.is_single_process
        if self._head is not None and not self._head.head.is_tapping:  # it needs all final states
            only_draws = False
        hidden = self._compute(started, draws if only_draws else None)
        prompt_logprobs = self._prompt_logprobs(started, reporting, hidden)
        if len(draws.tokens) < len(hidden):
            hidden = hidden.index_select(0, self._tensor(draws.tokens))
        return hidden, prompt_logprobs

    def read_block(self, block_id: int) -> bytes:
        """Return a KV block's content over all layers; no step may write it."""
        return read_block(self._blocks, block_id)

    def write_block(self, block_id: int, content: bytes) -> None:
        """Replace a block's content with one from `read_block`; no step may use it."""
        write_block(self._blocks, block_id, content)

    @property
    def block_format(self) -> str:
        """Shape and dtype of a block's content."""
        first = self._cache[0]
        return f"{len(self._blocks)} x {tuple(first.shape[1:])} {first.dtype}"

    def _compute(self, started: StartedStep, draws: Draws | None) -> Tensor:
        """Return the states of all tokens, or only those of `draws` if given and supported."""
        model, rows, shape = self.model, started.rows, started.shape
        for adapter_slot, weights in started.new_adapters.items():
            model.load_adapter(adapter_slot, weights)
        is_plain = started.adapters is None and started.images is None
        recorded = self._graphs if is_plain else None
        if recorded is not None and (hidden := recorded.run(rows, shape)) is not None:
            return hidden
        taps = NO_TAPS if self._head is None else self._head.new_taps()
        step = step_tokens(
            model,
            self._table,
            rows,
            shape,
            draws=draws,
            adapters=started.adapters,
            taps=taps,
            images=started.images,
        )
        incoming = None if started.incoming is None else started.incoming.wait()
        states: Tensor = model(step, self._cache, incoming)
        if self._head is not None:
            self._head.store_states(states, taps)
        return states

    def _prompt_logprobs(
        self, started: StartedStep, reporting: npt.NDArray[np.int64], hidden: Tensor
    ) -> dict[int, list[TokenLogprob]]:
        """Return the log probability of each prompt token that follows a computed one, by row."""
        rows, adapters = started.rows, started.adapters
        num_logprobs = self._table.sampling.prompt_logprobs[rows.slots]
        result: dict[int, list[TokenLogprob]] = {}
        for row in reporting.tolist():
            slot, start = int(rows.slots[row]), int(rows.starts[row])
            end = min(start + int(rows.counts[row]) + 1, int(self._table.num_prompt_tokens[slot]))
            following = self._table.token_ids[slot, start + 1 : end].astype(np.int64)
            first = int(rows.first_token[row])
            entries: list[TokenLogprob] = []
            for offset in range(0, len(following), _PROMPT_LOGPROB_ROWS):
                chosen = following[offset : offset + _PROMPT_LOGPROB_ROWS]
                tokens = np.arange(first + offset, first + offset + len(chosen))
                states = hidden[tokens[0] : tokens[-1] + 1]
                num_alternatives = np.full(len(chosen), num_logprobs[row])
                logits = self.model.logits(states, self._head_adapters(adapters, tokens))
                entries += token_logprobs(logits, chosen, num_alternatives)
            if entries:
                result[row] = entries
        return result

    def _tensor(self, array: npt.NDArray[np.int64]) -> Tensor:
        return to_device(array, self.model.device)


def _verified(
    plan: BatchPlan,
    draws: Draws,
    sampled: Sampled,
    prompt_logprobs: dict[int, list[TokenLogprob]],
    grammars: GrammarTable | None,
) -> BatchResult:
    """Return a step's result with only the samples that are kept.

    A sample is kept if all proposed tokens before it were sampled as well, and no grammar ended.
    """
    token_ids, logprobs = sampled.token_ids, sampled.logprobs
    kept = np.ones(len(token_ids), np.bool_)
    accepted: dict[int, int] = {}
    for row, first in draws.first.items():
        proposed = plan.proposed[row]
        sampled_ids = token_ids[first : first + len(proposed)]
        rejected = np.flatnonzero(sampled_ids != proposed)
        accepted[row] = int(rejected[0]) if len(rejected) else len(proposed)
        kept[first + accepted[row] + 1 : first + len(proposed) + 1] = False
    ends = Ends({}, {}, {})
    if grammars is not None:
        ends = grammars.advance(draws.slots[kept].tolist(), token_ids[kept].tolist())
    for row, first in draws.first.items():
        surplus = ends.surplus.get(plan.slots[row], 0)
        last = first + accepted[row]
        kept[last + 1 - surplus : last + 1] = False
        accepted[row] -= surplus
    if logprobs is not None:
        logprobs = [logprobs[index] for index in np.flatnonzero(kept).tolist()]
    return BatchResult(
        token_ids[kept].tolist(),
        logprobs,
        prompt_logprobs,
        accepted,
        ends.reasons,
        ends.stalls,
        mask_us={} if grammars is None else grammars.mask_us,
        mask_wait_us=0 if grammars is None else grammars.waited_us,
    )
