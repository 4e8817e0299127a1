"""A thin aiohttp shim around OpenVINO GenAI's continuous batching, which has no server of its own.

Just enough of /v1/completions to be measured fairly: one thread steps the pipeline, tokens reach the streams at once.
Runs in the peer's own environment: python openvino_server.py MODEL.gguf PORT
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
from typing import Any

import openvino_genai
from aiohttp import web


class Pipeline:
    """Owns the pipeline and the thread that steps it."""

    def __init__(self, model: str) -> None:
        config = openvino_genai.SchedulerConfig()
        config.cache_size = 2  # GB
        config.max_num_batched_tokens = 512
        config.dynamic_split_fuse = True
        config.enable_prefix_caching = True
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, config, "CPU")
        self.tokenizer = self.pipeline.get_tokenizer()
        self.arrived = threading.Condition()
        self.new: list[tuple[Any, Any, asyncio.Queue[Any], asyncio.AbstractEventLoop]] = []
        self.ids = itertools.count()
        threading.Thread(target=self.work, daemon=True).start()

    def submit(self, prompt: str, max_tokens: int) -> tuple[int, asyncio.Queue[Any]]:
        ids = self.tokenizer.encode(prompt).input_ids
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        queue: asyncio.Queue[Any] = asyncio.Queue()
        with self.arrived:
            self.new.append((ids, config, queue, asyncio.get_running_loop()))
            self.arrived.notify()
        return int(ids.shape[1]), queue

    def work(self) -> None:
        live: list[tuple[Any, asyncio.Queue[Any], asyncio.AbstractEventLoop]] = []
        while True:
            with self.arrived:
                while not self.new and not live:
                    self.arrived.wait()
                new, self.new = self.new, []
            for ids, config, queue, loop in new:
                live.append((self.pipeline.add_request(next(self.ids), ids, config), queue, loop))
            self.pipeline.step()
            still = []
            for handle, queue, loop in live:
                done = False
                while handle.can_read():
                    (output,) = handle.read().values()
                    done = output.finish_reason != openvino_genai.GenerationFinishReason.NONE
                    loop.call_soon_threadsafe(queue.put_nowait, (list(output.generated_ids), done))
                if not done:
                    still.append((handle, queue, loop))
            live = still


async def completions(request: web.Request) -> web.StreamResponse:
    pipeline: Pipeline = request.app["pipeline"]
    body = await request.json()
    prompt_tokens, queue = pipeline.submit(body["prompt"], body["max_tokens"])
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    ids: list[int] = []
    text, done = "", False
    while not done:
        new, done = await queue.get()
        ids += new
        whole = pipeline.tokenizer.decode(ids)
        event = {"choices": [{"index": 0, "text": whole[len(text) :], "finish_reason": "length" if done else None}]}
        text = whole
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids)}
    await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
    return response


def main() -> None:
    app = web.Application()
    app["pipeline"] = Pipeline(sys.argv[1])
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/health", lambda _: web.Response())
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None, access_log=None)


main()
