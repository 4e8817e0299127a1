"""From a configuration to an engine that is ready: files -> backend -> weights -> KV cache -> scheduler.

Owns the order of these steps and the arithmetic of sizes; keeps no state of its own. It must not know HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from minserve.backend import create_backend
from minserve.backend.base import Backend, BackendError, CheckpointError, Forward, ModelSpec, StepLimits
from minserve.backend.memory import give_back
from minserve.config import Config, EngineConfig, PoolConfig, PoolsConfig
from minserve.engine import Engine, Observer
from minserve.models import load as load_model
from minserve.policy.limits import Limits, PoolLimits
from minserve.request import Pool, SamplingParams, Submission
from minserve.runner import Runner
from minserve.scheduler import Scheduler
from minserve.text.template import ChatTemplate
from minserve.text.tokenizer import Tokenizer
from minserve.weights.checkpoint import load_checkpoint
from minserve.weights.hub import resolve
from minserve.weights.loaded import GenerationDefaults, LoadedModel

Say = Callable[[str], None]  # a line for whoever waits
Fetch = Callable[[Config], Path]  # makes sure that the model's files are here, and says where


@dataclass(frozen=True, slots=True)
class Assembly:
    """Everything a server, a terminal or a test needs, and nothing that was only needed to load it: files are unmapped.

    notes: lines a person should read at start.
    """

    name: str
    source: Path
    backend: Backend
    spec: ModelSpec
    limits: Limits
    max_model_len: int
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: GenerationDefaults
    file_format: str
    engine: Engine
    notes: tuple[str, ...]

    def capacity(self) -> str:
        """How many requests of which length fit at once, for the start-up lines."""
        tokens = self.limits.num_blocks * self.limits.block_size
        longest = min(self.limits.max_seqs, tokens // self.max_model_len)
        each = min(self.max_model_len, tokens // self.limits.max_seqs)
        more = "" if each == self.max_model_len else f", or {self.limits.max_seqs} of {each}"
        return (
            f"{self.limits.num_blocks} blocks of {self.limits.block_size} tokens: "
            f"{longest} requests of {self.max_model_len} tokens at once{more}"
        )


def files_of(config: Config) -> Path:
    """Where the model's files are, fetched if need be, without a word."""
    return resolve(config.model.name, revision=config.model.revision)


def assemble(
    config: Config,
    *,
    observers: Sequence[Observer] = (),
    progress: Say = lambda _: None,
    fetch: Fetch = files_of,
) -> Assembly:
    """Load everything and compile. CheckpointError, BackendError or DownloadError, each a clear sentence.

    fetch: `files_of`, or what also shows how a download goes.
    """
    assembly = _assemble(config, observers, progress, fetch(config))
    give_back()  # here, not inside: what loading needed is free only once that has returned
    return assembly


def _assemble(config: Config, observers: Sequence[Observer], progress: Say, source: Path) -> Assembly:
    engine_config = config.engine
    progress(f"reading {source}")
    loaded = load_checkpoint(source)
    notes: list[str] = []
    backend = create_backend(
        engine_config, config.model, weights_id=loaded.weights_id, progress=progress, note=notes.append
    )
    # After the backend, which meanwhile reads what it keeps of the weights; before them, since it may refuse.
    tokenizer = Tokenizer.from_source(loaded.tokenizer)
    template = read_template(config, loaded, tokenizer)
    if template.built_in:
        notes.append("The model has no chat template, so chats are written as ChatML: answers may suffer from it.")
    progress(f"loading weights on {backend.description}")
    model = load_model(loaded.checkpoint, backend, engine_config.max_model_len)
    num_blocks, max_model_len = size_cache(engine_config, backend, model.forward, model.spec, notes)
    limits = make_limits(engine_config, config.pools, num_blocks, max_model_len)
    program = backend.build(model.forward, model.spec, step_limits(engine_config, num_blocks, max_model_len))
    per_token = backend.bytes_per_block(model.spec.kv) / backend.block_size
    runner = Runner(program, model.spec, backend.peaks(), per_token)
    progress("warming up")
    warm_up(runner, limits, tokenizer, max_model_len)
    scheduler = Scheduler(limits, weights_id=loaded.weights_id, prefix_caching=engine_config.prefix_caching)
    engine = Engine(scheduler, runner, tokenizer, itl_target=engine_config.itl_target_ms / 1000, observers=observers)
    return Assembly(
        name=config.model.served_name or default_name(config.model.name),
        source=source,
        backend=backend,
        spec=model.spec,
        limits=limits,
        max_model_len=max_model_len,
        tokenizer=tokenizer,
        template=template,
        defaults=loaded.defaults,
        file_format=loaded.file_format,
        engine=engine,
        notes=tuple(notes),
    )


def warm_up(runner: Runner, limits: Limits, tokenizer: Tokenizer, max_model_len: int) -> None:
    """A prompt and two tokens through a scheduler of their own, so that the first caller does not pay for it.

    What is slow only once: libraries that load lazily, memory that nobody has touched. A longer prompt would touch more
    of it, and delay the start on a CPU by more than it saves the first caller.
    """
    engine = Engine(Scheduler(limits, weights_id=b"", prefix_caching=False), runner, tokenizer)
    length = min(limits.max_step_tokens, max_model_len - 2, 64)
    engine.submit(Submission("warm-up", (0,) * max(1, length), SamplingParams(max_tokens=2, temperature=0.0)))
    while engine.has_work:
        step = engine.begin()
        engine.complete(step, engine.run(step))  # not engine.step: what fails here must stop the start


def memory_fraction(config: EngineConfig, backend: Backend) -> float:
    """A GPU is ours alone; on a CPU pages of other programs, the page cache and our own arrays need room too."""
    return config.memory_fraction or (0.9 if backend.name == "cuda" else 0.5)


def size_cache(
    config: EngineConfig, backend: Backend, forward: Forward, spec: ModelSpec, notes: list[str]
) -> tuple[int, int]:
    """(blocks, max_model_len): what the configuration asks for, cut to what memory holds; a cut is noted.

    More blocks than all seats at full length could ever fill are not taken.
    """
    per_block = backend.bytes_per_block(spec.kv)
    wanted = spec.max_model_len
    scratch = backend.scratch_memory(forward, spec, step_limits(config, 0, wanted))
    if config.num_blocks:
        blocks = config.num_blocks
    else:
        free = max(0, backend.free_memory() - scratch)
        memory = config.kv_cache_bytes or int(free * memory_fraction(config, backend))
        blocks = min(memory // per_block, -(-wanted // backend.block_size) * config.max_num_seqs)
    if blocks < 2:
        beside = f" beside {scratch / 1e6:.0f} MB for max_num_batched_tokens and max_logit_rows" if scratch else ""
        raise BackendError(
            f"No memory for the KV cache{beside}: "
            f"a block of {backend.block_size} tokens takes {per_block / 1e6:.1f} MB. "
            "Free some memory, or raise memory_fraction or kv_cache_bytes."
        )
    fits = blocks * backend.block_size
    if wanted > fits:
        notes.append(f"max_model_len is {fits} instead of {wanted}: that is what {blocks} KV blocks hold.")
    return blocks, min(wanted, fits)


def step_limits(config: EngineConfig, num_blocks: int, max_model_len: int) -> StepLimits:
    """The largest step. It always has room for one token and one row of every seat."""
    seats = config.max_num_seqs
    return StepLimits(
        max_tokens=max(config.max_num_batched_tokens, seats),
        max_requests=seats,
        max_rows=max(config.max_logit_rows, seats),
        max_model_len=max_model_len,
        num_blocks=num_blocks,
    )


def make_limits(config: EngineConfig, pools: PoolsConfig, num_blocks: int, max_model_len: int) -> Limits:
    """The scheduler's limits."""
    seats, step = config.max_num_seqs, step_limits(config, num_blocks, max_model_len)

    def part(pool: PoolConfig) -> PoolLimits:
        return PoolLimits(pool.max_num_seqs or seats, pool.token_share, pool.kv_share)

    return Limits(
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_seqs=seats,
        max_step_tokens=step.max_tokens,
        chunk_tokens=step.max_tokens,
        max_rows=step.max_rows,
        watermark_blocks=min(num_blocks // 100 + 1, -(-max_model_len // config.block_size)),
        pools={pool: part(pools.of(pool)) for pool in Pool},
    )


def default_name(model: str) -> str:
    """What /v1/models calls a model that was given as a path or a repo id: the last part, without .gguf."""
    return os.path.basename(model.rstrip("/\\")).removesuffix(".gguf") or model


def read_template(config: Config, loaded: LoadedModel, tokenizer: Tokenizer) -> ChatTemplate:
    source = loaded.chat_template
    if config.model.chat_template is not None:
        try:
            source = Path(config.model.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"model.chat_template: {config.model.chat_template}: {error}") from error
    return ChatTemplate(source, tokenizer)
