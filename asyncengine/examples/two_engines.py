"""Two engines in one process: one writes endings, one ranks them.

Both run in one event loop. Each has its own threads and its own memory; on a GPU, gpu_memory_utilization shares the
card between them.
"""

import argparse
import asyncio

from asyncengine import AsyncEngine, SamplingParams, bundled_model

BEGINNING = "Once upon a time a little fox was hungry."


async def main(writer_model: str, judge_model: str) -> None:
    async with (
        AsyncEngine.from_pretrained(writer_model, num_kv_blocks=64, max_model_len=256) as writer,
        AsyncEngine.from_pretrained(judge_model, num_kv_blocks=64, max_model_len=256, dtype="float32") as judge,
    ):
        output = await writer.generate(BEGINNING, SamplingParams(n=4, max_tokens=16, temperature=1.2, seed=3))
        endings = [sequence.text for sequence in output.outputs]
        scores = await asyncio.gather(*(judge.score(BEGINNING, ending) for ending in endings))
        for ending, score in sorted(zip(endings, scores, strict=True), key=lambda pair: -pair[1].total):
            print(f"{score.total:7.2f} {ending.strip()!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=bundled_model(), help="directory or hub id (default: bundled)")
    parser.add_argument("--judge", default=bundled_model(), help="the second engine's model (default: bundled)")
    args = parser.parse_args()
    asyncio.run(main(args.model, args.judge))
