"""The engine as a worker of NVIDIA Dynamo: ``python -m asyncengine.integrations.dynamo MODEL [options]``.

Options are those of ``asyncengine serve`` for the engine, and Dynamo's own, such as --namespace. Dynamo's router learns
from events what the KV cache holds. Needs ai-dynamo (asyncengine[dynamo]).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from tempfile import TemporaryDirectory
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.utils.runtime import parse_endpoint
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, WorkerUnavailable

import asyncengine.errors as errors
from asyncengine.cli import embed
from asyncengine.engine.data_parallel import DataParallelEngine
from asyncengine.engine.engine import AsyncEngine
from asyncengine.integrations.dynamo_requests import cache_salt_of, chunk_of, sampling_params, token_ids_of
from asyncengine.server.kv_events import KVEventPublisher
from asyncengine.text.detokenizer import token_bytes

_SNAPSHOT_S = 0.1


class DynamoEngine(LLMEngine):  # type: ignore[misc]  # the class is not known without ai-dynamo
    """An AsyncEngine behind Dynamo's interface. Dynamo calls its methods from one event loop."""

    def __init__(self, engine: AsyncEngine, served_model_name: str) -> None:
        """``engine`` has not been started; it needs kv_events, and one device."""
        if isinstance(engine, DataParallelEngine):
            raise errors.ConfigError("Dynamo chooses among workers: start one for each device")
        self._engine = engine
        self._name = served_model_name
        self._used = AsyncExitStack()
        self._events: list[ZmqSource] = []
        self._publisher: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DynamoEngine, WorkerConfig]:
        """Make the engine and Dynamo's configuration from a command line. Exits for a wrong option."""
        parser = argparse.ArgumentParser(prog="python -m asyncengine.integrations.dynamo", allow_abbrev=False)
        embed.add_model(parser)
        parser.add_argument("--served-model-name", metavar="NAME")
        embed.add_engine(parser, exclude=("kv_events", "data_parallel_size"))
        dynamo = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        DynamoRuntimeArgGroup().add_arguments(dynamo)
        theirs, rest = dynamo.parse_known_args(argv)
        ours, runtime = parser.parse_args(rest), DynamoRuntimeConfig.from_cli_args(theirs)
        runtime.validate()
        address = runtime.endpoint or f"{runtime.namespace}.backend.generate"
        runtime.namespace, runtime.component, runtime.endpoint = parse_endpoint(address)
        ours.kv_events = getattr(ours, "enable_prefix_caching", True)
        engine = embed.engine_from(ours)
        name = ours.served_model_name or getattr(ours, "model", embed.BUNDLED_MODEL_NAME)
        return cls(engine, name), WorkerConfig.from_runtime_config(runtime, engine.config.model, name)

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model. Afterwards ``generate`` serves."""
        await self._used.enter_async_context(self._engine)
        if self._engine.config.kv_events:
            endpoint = f"ipc://{self._used.enter_context(TemporaryDirectory())}/events"
            await self._used.enter_async_context(KVEventPublisher(self._engine, endpoint))
            self._events = [ZmqSource(endpoint=endpoint)]
        publishing = asyncio.create_task(self._publish())
        self._used.callback(publishing.cancel)
        info, config = self._engine.model_info, self._engine.config
        return EngineConfig(
            model=config.model,
            served_model_name=self._name,
            llm=LlmRegistration(
                context_length=info.max_model_len,
                kv_cache_block_size=info.block_size,
                total_kv_blocks=info.num_kv_blocks,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
            ),
        )

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the pieces of one request's output; one that was aborted ends as cancelled."""
        try:
            params = sampling_params(request)
            names = token_bytes(self._engine.tokenizer) if params.logprobs is not None else None
            stream = await self._engine.submit(
                token_ids_of(request), params, request_id=context.id(), cache_salt=cache_salt_of(request)
            )
            async with aclosing(stream):
                async for delta in stream:
                    yield chunk_of(delta, stream.cached_tokens, names)
        except errors.RequestAbortedError:
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
        except errors.InvalidRequestError as e:
            raise InvalidArgument(str(e)) from e
        except errors.EngineOverloadedError as e:
            raise WorkerUnavailable(str(e)) from e
        except (errors.EngineClosedError, errors.EngineDeadError) as e:
            raise EngineShutdown(str(e)) from e

    async def abort(self, context: Any) -> None:
        """End a request whose client has left."""
        if self._engine.health == "ready":
            self._engine.abort(context.id())

    async def is_quiescent(self) -> bool:
        """Return True: no transfer of keys and values to other workers is ever under way."""
        return True

    async def cleanup(self) -> None:
        """Release everything, also after a start that failed. A second call does nothing."""
        await self._used.aclose()

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Addresses of the events of the KV cache."""
        return self._events

    async def health_check_payload(self) -> dict[str, Any]:
        """Return a request that Dynamo sends while the worker is idle."""
        return dict(build_health_check_payload(bos_token_id=0))

    def component_metrics_dp_ranks(self) -> list[int]:
        """One engine, and so one rank."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Take what tells Dynamo how full the KV cache is. Any thread may call."""
        self._publisher = publisher

    async def _publish(self) -> None:
        while self._engine.health == "ready":
            await asyncio.sleep(_SNAPSHOT_S)
            if self._publisher is None:
                continue
            stats = self._engine.stats()
            rate = stats.prefix_cache_hits / stats.prefix_cache_queries if stats.prefix_cache_queries else None
            used = stats.num_kv_blocks - stats.num_free_blocks
            self._publisher.publish(0, ComponentSnapshot(used, stats.num_kv_blocks, stats.kv_cache_usage, 0, rate))


if __name__ == "__main__":
    run(DynamoEngine)
