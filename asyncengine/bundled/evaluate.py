"""Held-out prompts for the bundled model, and the share of its continuations that are well-formed stories."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncengine.bundled.grammar import Story, generate, parse, write


@dataclass(frozen=True)
class Case:
    """A prompt, and what must come of it: `head` + continuation is a story that agrees with `wanted`."""

    kind: str
    prompt: str
    """Prompt as the tokenizer is to see it; a chat is rendered by the template and begins with its own <|bos|>."""
    head: str
    wanted: Story

    def fault(self, continuation: str) -> str | None:
        """Name the fault of a continuation: "malformed", "disobeys", or None if it is as wanted."""
        told = parse((self.head + continuation).strip())
        if told is None:
            return "malformed"
        return None if self.wanted.items() <= told.items() else "disobeys"


def prefix_cases(rng: random.Random) -> Iterator[Case]:
    """Stories cut off at any character of their first half, in the middle of words too."""
    while True:
        story = generate(rng)
        head = story[: rng.randint(1, len(story) // 2)]
        yield Case("prefix", head, head, {})


def chat_cases(rng: random.Random, render: Callable[[list[dict[str, str]]], str]) -> Iterator[Case]:
    """Requests for a story; `render` applies the chat template with the generation prompt."""
    while True:
        text, wanted = write(rng, "request", anyone=True)
        yield Case("chat", render([{"role": "user", "content": text}]), "", wanted)


def small_talk_cases(rng: random.Random) -> Iterator[Case]:
    """Texts that begin no story, to be continued without a template."""
    while True:
        yield Case("small talk", write(rng, "small_talk")[0], "", {})


def continuations(model: Any, tokenizer: Any, prompts: Sequence[str], **generation: Any) -> list[str]:
    """Continue the prompts in batches with transformers' `generate`; greedy unless `generation` differs."""
    tokenizer.padding_side = "left"
    texts: list[str] = []
    for i in range(0, len(prompts), 256):
        batch = tokenizer(
            [prompt.removeprefix(tokenizer.bos_token) for prompt in prompts[i : i + 256]],
            return_tensors="pt",
            padding=True,
        ).to(model.device)
        with torch.inference_mode():
            output = model.generate(**batch, **({"max_new_tokens": 256, "do_sample": False} | generation))
        texts += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def report(cases: Sequence[Case], texts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Count the prompts of each kind, and the shares of texts that are well-formed and that are as wanted."""
    faults: dict[str, list[str | None]] = {}
    for case, text in zip(cases, texts, strict=True):
        faults.setdefault(case.kind, []).append(case.fault(text))
    return {
        kind: {
            "prompts": len(found),
            "well-formed": 1 - found.count("malformed") / len(found),
            "as wanted": found.count(None) / len(found),
        }
        for kind, found in faults.items()
    }
